from __future__ import annotations

import threading
from typing import Optional


class PinnedLease:
    __slots__ = ("arena", "off", "size", "live")

    def __init__(self, arena: "PinnedArena", off: int, size: int) -> None:
        self.arena = arena
        self.off = off
        self.size = size
        self.live = True

    def view(self) -> memoryview:
        return self.arena.mem[self.off:self.off + self.size]

    def free(self) -> None:
        if self.live:
            self.live = False
            self.arena._give(self)


class PinnedArena:
    """First-fit over one registered region."""

    def __init__(self, nbytes: int) -> None:
        self.mem = memoryview(bytearray(nbytes))
        self.holes: list[tuple[int, int]] = [(0, nbytes)]
        self.mu = threading.Lock()

    def alloc(self, size: int) -> Optional[PinnedLease]:
        with self.mu:
            for i, (off, n) in enumerate(self.holes):
                if n >= size:
                    if n == size:
                        self.holes.pop(i)
                    else:
                        self.holes[i] = (off + size, n - size)
                    return PinnedLease(self, off, size)
        return None

    def _give(self, lease: PinnedLease) -> None:
        with self.mu:
            self.holes.append((lease.off, lease.size))
            self.holes.sort()
            merged: list[tuple[int, int]] = []
            for off, n in self.holes:
                if merged and merged[-1][0] + merged[-1][1] == off:
                    merged[-1] = (merged[-1][0], merged[-1][1] + n)
                else:
                    merged.append((off, n))
            self.holes = merged

    def free_bytes(self) -> int:
        return sum(n for _, n in self.holes)
