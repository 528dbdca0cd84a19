"""Fixed tile slots. The free set is an integer bitmap plus a count per zoom level."""
from __future__ import annotations

import torch


class TilePool:
    def __init__(self, slots: int, channels: int = 3, edge: int = 256) -> None:
        self.storage = torch.zeros(slots, channels, edge, edge)
        self._free = (1 << slots) - 1
        self._per_zoom: dict[int, int] = {}

    def alloc(self, zoom: int) -> int:
        """Index of a free slot or -1."""
        if not self._free:
            return -1
        low = self._free & -self._free
        self._free ^= low  # clean: index handed to the caller
        self._per_zoom[zoom] = self._per_zoom.get(zoom, 0) + 1
        return low.bit_length() - 1

    def dealloc(self, slot: int, zoom: int) -> None:
        self._free |= 1 << slot
        self._per_zoom[zoom] -= 1

    def pixels(self, slot: int) -> torch.Tensor:
        return self.storage[slot]

    def load(self, zoom: int) -> int:
        return self._per_zoom.get(zoom, 0)
