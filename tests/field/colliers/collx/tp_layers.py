from __future__ import annotations

import logging
from typing import Optional

from .handles import Handle, issue, issue_shared
from .symm import Scoped, SymmBuffer, SymmHeap

log = logging.getLogger("collx")


class RowParallel:
    def __init__(self, heap: SymmHeap, world: int) -> None:
        self.heap = heap
        self.world = world
        self.inflight: list[Handle] = []
        self.prev: Optional[Handle] = None
        self.out: Optional[SymmBuffer] = None

    def forward(self, x: list[float]) -> list[float]:
        h = issue(self.heap, x, lambda v: v * self.world)  # clean: waited
        return h.wait()

    def forward_fused(self, x: list[float], residual: Optional[list[float]]) -> Optional[list[float]]:
        h = issue(self.heap, x, lambda v: v * self.world)  # leak: a shape mismatch returns None without wait
        if residual is not None and len(residual) != len(x):
            log.error("residual shape")
            return None
        y = h.wait()
        return y if residual is None else [a + b for a, b in zip(y, residual)]

    def backward_async(self, g: list[float]) -> None:
        self.inflight.append(issue(self.heap, g, lambda v: v / self.world))  # clean: finish waits for everything in flight

    def finish(self) -> list[list[float]]:
        out = [h.wait() for h in self.inflight]
        self.inflight.clear()
        return out

    def overlap_step(self, x: list[float]) -> list[float]:
        """Returns the result of the previous call; drain() gets the last."""
        h = issue(self.heap, x, float)  # clean: near miss, the replaced handle is waited, drain waits for the last
        prev, self.prev = self.prev, h
        return prev.wait() if prev is not None else []

    def drain(self) -> list[float]:
        h, self.prev = self.prev, None
        return h.wait() if h is not None else []

    def all_gather(self, xs: list[float], keep: bool) -> Optional[SymmBuffer]:
        """With keep the caller owns the buffer."""
        sc = Scoped(self.heap)
        with sc as b:  # clean: context manager
            b.data[:len(xs)] = xs
            return sc.keep() if keep else None

    def gather_sum(self, xs: list[float]) -> float:
        b = self.all_gather(xs, keep=True)  # leak: only the sum goes out
        return sum(b.data) if b is not None else 0.0

    def gather_max(self, xs: list[float]) -> float:
        b = self.all_gather(xs, keep=True)  # clean: released after use
        if b is None:
            return 0.0
        m = max(b.data)
        self.heap.release(b)
        return m

    def fan(self, src: SymmBuffer, n: int, peers: list[int]) -> list[list[float]]:
        outs = []
        for p in peers:
            h = issue_shared(self.heap, src, n)  # leak: one's own rank continues without wait
            if p == 0:
                continue
            outs.append(h.wait())
        return outs


if __name__ == "__main__":
    heap = SymmHeap(4, 8)
    rp = RowParallel(heap, 2)
    print(rp.forward([1.0, 2.0]), rp.overlap_step([1.0]), rp.overlap_step([2.0]), rp.drain())
    rp.backward_async([2.0])
    print(rp.finish(), rp.gather_max([3.0]), len(heap.idle))
