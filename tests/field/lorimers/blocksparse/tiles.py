from __future__ import annotations

import threading
from typing import List, Optional


class Tile:
    __slots__ = ("id", "bits")

    def __init__(self, id: int) -> None:
        self.id = id
        self.bits = 0


class TilePool:
    def __init__(self, n: int) -> None:
        self._free = [Tile(i) for i in range(n)]
        self._mu = threading.Lock()
        self.total = n

    def grab(self) -> Optional[Tile]:
        with self._mu:
            return self._free.pop() if self._free else None

    def ungrab(self, tile: Tile) -> None:
        tile.bits = 0
        with self._mu:
            self._free.append(tile)

    @property
    def held(self) -> int:
        return self.total - len(self._free)


class Layout:
    """Tiles of one mask. Counted: `retain` adds a holder, `drop` removes one."""

    def __init__(self, pool: TilePool, tiles: List[Tile]) -> None:
        self.pool = pool
        self.tiles = tiles
        self.holders = 1

    def retain(self) -> "Layout":
        self.holders += 1
        return self

    def drop(self) -> None:
        self.holders -= 1
        if self.holders == 0:
            while self.tiles:
                self.pool.ungrab(self.tiles.pop())
