"""Private memory pools for captured graphs, one per batch size."""
from dataclasses import dataclass, field
from typing import Any, Optional


class GraphPoolRegistry:
    def __init__(self) -> None:
        self._count = 0
        self._open: set = set()

    def lease(self) -> int:
        self._count += 1
        self._open.add(self._count)
        return self._count

    def revoke(self, handle: int) -> None:
        self._open.remove(handle)


@dataclass
class CapturedGraph:
    batch_size: int
    handle: int
    graph: Any = None
    hits: int = 0


@dataclass
class GraphRunner:
    registry: GraphPoolRegistry
    graphs: dict = field(default_factory=dict)
    warm: Optional[int] = None

    def capture(self, batch_size, fn):
        if batch_size in self.graphs:
            return self.graphs[batch_size]
        handle = self.registry.lease()  # clean: near miss, revoked by evict and reset through the captured graph
        captured = CapturedGraph(batch_size, handle, fn)
        self.graphs[batch_size] = captured
        return captured

    def evict(self, batch_size):
        captured = self.graphs.pop(batch_size, None)
        if captured is not None:
            self.registry.revoke(captured.handle)

    def reset(self):
        for captured in self.graphs.values():
            self.registry.revoke(captured.handle)
        self.graphs.clear()

    def recapture(self, batch_size, fn):
        handle = self.registry.lease()  # leak: nothing happens to it when the size was never captured
        old = self.graphs.get(batch_size)
        if old is not None:
            self.registry.revoke(old.handle)
            old.handle = handle
            old.graph = fn
        return old

    def warmup(self):
        self.warm = self.registry.lease()  # leak: warming up twice overwrites the first handle

    def cooldown(self):
        if self.warm is not None:
            self.registry.revoke(self.warm)
            self.warm = None

    def measure(self, fn):
        handle = self.registry.lease()  # clean: near miss, revoked on both branches
        if fn is None:
            self.registry.revoke(handle)
            return 0.0
        cost = float(fn(handle))
        self.registry.revoke(handle)
        return cost
