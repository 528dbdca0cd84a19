"""Pixel arena: regions of one large host allocation, first fit with coalescing."""
from __future__ import annotations

import bisect
import threading
from dataclasses import dataclass
from typing import List, Optional, Tuple


@dataclass(frozen=True)
class Region:
    offset: int
    size: int


class PixelArena:
    """carve() answers a region or None; restore() returns it to the free list."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = memoryview(bytearray(size))
        self._free: List[Tuple[int, int]] = [(0, size)]
        self._lock = threading.Lock()

    def carve(self, size: int) -> Optional[Region]:
        with self._lock:
            for i, (off, room) in enumerate(self._free):
                if room < size:
                    continue
                if room == size:
                    del self._free[i]
                else:
                    self._free[i] = (off + size, room - size)
                return Region(off, size)
        return None

    def restore(self, region: Region) -> None:
        with self._lock:
            i = bisect.bisect_left(self._free, (region.offset, region.size))
            self._free.insert(i, (region.offset, region.size))
            merged: List[Tuple[int, int]] = []
            for off, room in self._free:
                if merged and merged[-1][0] + merged[-1][1] == off:
                    merged[-1] = (merged[-1][0], merged[-1][1] + room)
                else:
                    merged.append((off, room))
            self._free = merged

    def write(self, region: Region, data: bytes) -> None:
        n = min(region.size, len(data))
        self.memory[region.offset : region.offset + n] = data[:n]

    def read(self, region: Region) -> bytes:
        return bytes(self.memory[region.offset : region.offset + region.size])

    def regrow(self, region: Region, size: int) -> Optional[Region]:
        """A larger region with the same bytes; the old one ends here if it succeeds."""
        bigger = self.carve(size)  # clean: handed to the caller
        if bigger is None:
            return None
        self.write(bigger, self.read(region))
        self.restore(region)
        return bigger

    def halves(self, size: int) -> Optional[Tuple[Region, Region]]:
        """Two regions of the same size for double buffering."""
        a = self.carve(size)  # clean: restored when there is no second, else handed over
        if a is None:
            return None
        b = self.carve(size)  # clean: handed over in the pair
        if b is None:
            self.restore(a)
            return None
        return a, b
