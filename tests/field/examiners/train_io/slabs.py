"""Slabs of host memory and a guard object."""
from __future__ import annotations

from typing import List, Optional, Set


class Slab:
    def __init__(self, ident: int, size: int):
        self.ident = ident
        self.buf = bytearray(size)
        self.used = 0


class SlabArena:
    def __init__(self, count: int, size: int):
        self.size = size
        self._unused: List[Slab] = [Slab(i, size) for i in range(count)]
        self._lent: Set[int] = set()

    def lend(self) -> Optional[Slab]:
        if not self._unused:
            return None
        slab = self._unused.pop()  # clean: noted as lent and handed to the caller
        self._lent.add(slab.ident)
        slab.used = 0
        return slab

    def back(self, slab: Slab) -> None:
        self._lent.discard(slab.ident)
        self._unused.append(slab)


class SlabGuard:
    """`with SlabGuard(arena) as g` lends a slab; detach keeps it beyond the block."""

    def __init__(self, arena: SlabArena):
        self.arena = arena
        self.slab: Optional[Slab] = None

    def __enter__(self) -> "SlabGuard":
        self.slab = self.arena.lend()  # clean: near miss, __exit__ gives it back unless detach passed it on
        return self

    def detach(self) -> Optional[Slab]:
        slab, self.slab = self.slab, None
        return slab

    def __exit__(self, exc_type, exc, tb) -> None:
        if self.slab is None:
            return
        self.arena.back(self.slab)
        self.slab = None
