"""CUDA graph capture for decode: private memory pools shared between graphs."""
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Callable, Optional

log = logging.getLogger(__name__)


class MemPool:
    def __init__(self, size_class: int) -> None:
        self.size_class = size_class
        self.users = 0


class MemPoolRegistry:
    """Pools live while they have users; the last one parks them for reuse."""

    def __init__(self) -> None:
        self._parked: dict[int, list[MemPool]] = {}
        self.live = 0

    def take(self, size_class: int) -> MemPool:
        parked = self._parked.setdefault(size_class, [])
        mp = parked.pop() if parked else MemPool(size_class)
        mp.users = 1
        self.live += 1
        return mp

    def share(self, mp: MemPool) -> MemPool:
        mp.users += 1
        return mp

    def put(self, mp: MemPool) -> None:
        mp.users -= 1
        if mp.users == 0:
            self.live -= 1
            self._parked.setdefault(mp.size_class, []).append(mp)


@dataclass
class Graph:
    batch: int
    replay: Callable[[], Any]
    mp: MemPool


class CaptureScope:
    def __init__(self, registry: MemPoolRegistry, size_class: int) -> None:
        self.registry = registry
        self.size_class = size_class
        self.mp: Optional[MemPool] = None
        self._kept = False

    def __enter__(self) -> "CaptureScope":
        self.mp = self.registry.take(self.size_class)  # leak: __exit__ returns early on a failure that capture_or_eager survives
        return self

    def keep(self) -> MemPool:
        self._kept = True
        return self.mp

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None:
            log.warning("capture failed: %s", exc)
            return False
        if not self._kept:
            self.registry.put(self.mp)
        return False


class WarmupScope:
    """Pool for the eager runs that precede a capture."""

    def __init__(self, registry: MemPoolRegistry, size_class: int) -> None:
        self.registry = registry
        self.size_class = size_class
        self.mp: Optional[MemPool] = None

    def __enter__(self) -> "WarmupScope":
        self.mp = self.registry.take(self.size_class)  # clean: near miss, __exit__ returns early only once detach handed it on
        return self

    def detach(self) -> MemPool:
        mp, self.mp = self.mp, None
        return mp

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.mp is None:
            return False
        self.registry.put(self.mp)
        self.mp = None
        return exc_type is not None and issubclass(exc_type, StopIteration)


def capture_or_eager(registry: MemPoolRegistry, batch: int, record: Callable[[MemPool], Callable[[], Any]]) -> Optional[Graph]:
    try:
        with CaptureScope(registry, batch) as scope:  # clean: with, the scope itself is at fault
            replay = record(scope.mp)
            return Graph(batch, replay, scope.keep())
    except RuntimeError:
        return None


class DecodeGraphs:
    def __init__(self, registry: MemPoolRegistry) -> None:
        self.registry = registry
        self.graphs: dict[int, Graph] = {}
        self.aliases: dict[str, MemPool] = {}

    def record(self, batch: int, record: Callable[[MemPool], Callable[[], Any]]) -> None:
        with WarmupScope(self.registry, batch) as scope:  # clean: with, detached into the graph
            replay = record(scope.mp)
            self.evict(batch)
            self.graphs[batch] = Graph(batch, replay, scope.detach())

    def evict(self, batch: int) -> None:
        g = self.graphs.pop(batch, None)
        if g is not None:
            self.registry.put(g.mp)

    def record_shared(self, batch: int, base: int, replay: Callable[[], Any]) -> None:
        mp = self.registry.share(self.graphs[base].mp)  # clean: near miss, the graph in its place is evicted first
        self.evict(batch)
        self.graphs[batch] = Graph(batch, replay, mp)

    def alias(self, name: str, batch: int) -> None:
        self.aliases[name] = self.registry.share(self.graphs[batch].mp)  # leak: an alias moved to another batch overwrites the old one

    def close(self) -> None:
        for batch in list(self.graphs):
            self.evict(batch)
        for mp in self.aliases.values():
            self.registry.put(mp)
        self.aliases.clear()

    def pool_for(self, batch: int) -> Optional[MemPool]:
        """Shared pool of the smallest graph that fits; the caller puts it."""
        for b in sorted(self.graphs):
            mp = self.registry.share(self.graphs[b].mp)  # clean: near miss, returned when it fits, else put at once
            if b >= batch:
                return mp
            self.registry.put(mp)
        return None

    def run_eager(self, batch: int, fn: Callable[[MemPool], Any]) -> Any:
        mp = self.pool_for(batch)  # clean: put in finally
        if mp is None:
            mp = self.registry.take(batch)  # clean: near miss, put by the same finally
        try:
            return fn(mp)
        finally:
            self.registry.put(mp)

    def size_class_for(self, batch: int) -> int:
        mp = self.pool_for(batch)  # leak: only the size is read
        return mp.size_class if mp is not None else batch
