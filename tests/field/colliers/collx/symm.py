from __future__ import annotations

from collections import Counter
from typing import Any, Optional


class SymmBuffer:
    def __init__(self, slot: int, n: int) -> None:
        self.slot = slot
        self.data = [0.0] * n


class SymmHeap:
    """Symmetric buffers with a count each; a slot is free again at zero."""

    def __init__(self, slots: int, n: int) -> None:
        self.bufs = [SymmBuffer(i, n) for i in range(slots)]
        self.idle = list(range(slots))
        self.count: Counter[int] = Counter()

    def acquire(self) -> Optional[SymmBuffer]:
        if not self.idle:
            return None
        s = self.idle.pop()
        self.count[s] = 1
        return self.bufs[s]

    def retain(self, b: SymmBuffer) -> SymmBuffer:
        self.count[b.slot] += 1
        return b

    def release(self, b: SymmBuffer) -> None:
        self.count[b.slot] -= 1
        if self.count[b.slot] == 0:
            self.idle.append(b.slot)

    def acquire_or_raise(self) -> SymmBuffer:
        b = self.acquire()  # clean: returned to the caller
        if b is None:
            raise RuntimeError("symmetric heap exhausted")
        return b


class Scoped:
    """with Scoped(heap) as b"""

    def __init__(self, heap: SymmHeap) -> None:
        self.heap = heap
        self.kept = False

    def __enter__(self) -> SymmBuffer:
        self.b = self.heap.acquire_or_raise()  # clean: near miss, __exit__ leaves it alone only after keep handed it to the caller
        return self.b

    def keep(self) -> SymmBuffer:
        self.kept = True
        return self.b

    def __exit__(self, *exc: Any) -> None:
        if self.kept and exc[0] is None:
            return
        self.heap.release(self.b)
