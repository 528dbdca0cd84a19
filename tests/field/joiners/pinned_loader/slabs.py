from __future__ import annotations

import threading
from typing import List, Optional


class Slab:
    __slots__ = ("mem", "index", "length")

    def __init__(self, index: int, size: int):
        self.mem = bytearray(size)
        self.index = index
        self.length = 0

    def append(self, sample: bytes) -> bool:
        end = self.length + len(sample)
        if end > len(self.mem):
            return False
        self.mem[self.length:end] = sample
        self.length = end
        return True


class SlabArena:
    """A fixed number of slabs; lease blocks until one is restored."""

    def __init__(self, count: int, size: int):
        self._cv = threading.Condition()
        self._idle: List[Slab] = [Slab(i, size) for i in range(count)]
        self.count = count

    def lease(self, timeout: Optional[float] = None) -> Optional[Slab]:
        with self._cv:
            if not self._cv.wait_for(lambda: bool(self._idle), timeout):
                return None
            slab = self._idle.pop()
            slab.length = 0
            return slab

    def restore(self, slab: Slab) -> None:
        with self._cv:
            self._idle.append(slab)
            self._cv.notify()

    @property
    def idle(self) -> int:
        with self._cv:
            return len(self._idle)


class SlabLease:
    """A slab that is restored on exit unless it was handed off."""

    def __init__(self, arena: SlabArena, timeout: float = 1.0):
        self.arena = arena
        self.slab = arena.lease(timeout)  # clean: near miss, close or detach ends the holding

    def detach(self) -> Optional[Slab]:
        slab, self.slab = self.slab, None
        return slab

    def close(self) -> None:
        if self.slab is not None:
            self.arena.restore(self.slab)
            self.slab = None

    def __enter__(self) -> "SlabLease":
        return self

    def __exit__(self, *exc) -> None:
        self.close()
