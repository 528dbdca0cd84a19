from __future__ import annotations

from typing import Dict, List, Optional, Tuple

from .tiles import Layout, Tile, TilePool

MaskKey = Tuple[str, int]


def build_layout(pool: TilePool, key: MaskKey) -> Optional[Layout]:
    kind, blocks = key
    tiles: List[Tile] = []
    for i in range(blocks):
        tile = pool.grab()  # clean: near miss, the rollback ungrabs on refusal, else the Layout owns it
        if tile is None:
            for t in tiles:
                pool.ungrab(t)
            return None
        tile.bits = (1 << (i + 1)) - 1 if kind == "causal" else (1 << blocks) - 1
        tiles.append(tile)
    return Layout(pool, tiles)


def build_banded(pool: TilePool, blocks: int, band: int) -> Optional[Layout]:
    tiles: List[Tile] = []
    for i in range(blocks):
        tile = pool.grab()  # leak: tiles of all-zero rows are skipped by continue before they are listed
        if tile is None:
            Layout(pool, tiles).drop()
            return None
        lo = max(0, i - band)
        tile.bits = ((1 << (i + 1)) - 1) & ~((1 << lo) - 1) if band > 0 else 0
        if not tile.bits:
            continue
        tiles.append(tile)
    return Layout(pool, tiles)


class LayoutCache:
    """The cache is one holder of each layout in it; `fetch` gives the caller another."""

    def __init__(self, pool: TilePool, capacity: int = 4) -> None:
        self.pool = pool
        self.capacity = capacity
        self._entries: Dict[MaskKey, Layout] = {}

    def fetch(self, key: MaskKey) -> Optional[Layout]:
        layout = self._entries.get(key)
        if layout is None:
            layout = build_layout(self.pool, key)  # clean: the cache's own holding, dropped by eviction
            if layout is None:
                return None
            while len(self._entries) >= self.capacity:
                self._entries.pop(next(iter(self._entries))).drop()
            self._entries[key] = layout
        return layout.retain()  # clean: returned to the caller

    def install(self, key: MaskKey, band: int) -> bool:
        layout = build_banded(self.pool, key[1], band)  # leak: an entry already there is overwritten without drop
        if layout is None:
            return False
        self._entries[key] = layout
        return True

    def purge(self) -> None:
        for layout in self._entries.values():
            layout.drop()
        self._entries.clear()
