"""Worker selection policies. A picked worker is already occupied."""
import random

from .workers import Worker, WorkerRegistry


class LeastLoaded:
    """The worker with the most headroom."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self.registry = registry

    def pick(self, prompt: str) -> Worker | None:
        for worker in sorted(self.registry.workers, key=lambda w: w.load / w.capacity):
            if self.registry.occupy(worker):  # clean: the occupied worker is returned
                return worker
        return None


class CacheAware:
    """Prefers the worker that last saw the same prompt prefix."""

    def __init__(self, registry: WorkerRegistry, prefix_len: int = 256) -> None:
        self.registry = registry
        self.prefix_len = prefix_len
        self.fallback = LeastLoaded(registry)
        self._seen: dict[str, Worker] = {}

    def pick(self, prompt: str) -> Worker | None:
        prefix = prompt[:self.prefix_len]
        worker = self._seen.get(prefix)
        if worker is not None and self.registry.occupy(worker):  # leak: for a draining worker the fallback is returned instead
            if not worker.draining:
                return worker
        worker = self.fallback.pick(prompt)  # clean: returned, None is no worker
        if worker is not None:
            self._seen[prefix] = worker
        return worker


class PowerOfTwo:
    """Two random workers, the less loaded one wins."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self.registry = registry

    def pick(self, prompt: str) -> Worker | None:
        first, second = random.sample(self.registry.workers, 2)
        got_first = self.registry.occupy(first)  # clean: near miss, returned unless the second wins, then vacated
        if got_first and first.load <= second.load:
            return first
        if self.registry.occupy(second):  # clean: the occupied worker is returned
            if got_first:
                self.registry.vacate(first)
            return second
        return first if got_first else None
