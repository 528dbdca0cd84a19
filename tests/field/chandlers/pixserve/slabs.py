from __future__ import annotations

import threading
from dataclasses import dataclass

import torch


@dataclass
class Slab:
    pixels: torch.Tensor
    ordinal: int


class PixelSlabs:
    """Fixed-size [C, H, W] slabs in shared memory, filled by preprocessors."""

    def __init__(self, count: int, side: int) -> None:
        self.side = side
        self._ready = [Slab(torch.empty(3, side, side).share_memory_(), i) for i in range(count)]
        self._guard = threading.Lock()

    def lend(self) -> Slab | None:
        with self._guard:
            return self._ready.pop() if self._ready else None

    def reclaim(self, slab: Slab) -> None:
        with self._guard:
            self._ready.append(slab)


class FeatureSlots:
    """Slots of the encoder output; a slot is shared by all requests showing the same image."""

    def __init__(self, count: int) -> None:
        self._vacant = list(range(count))
        self._sharers = [0] * count

    def book(self) -> int | None:
        if not self._vacant:
            return None
        slot = self._vacant.pop()
        self._sharers[slot] = 1
        return slot

    def share(self, slot: int) -> int:
        self._sharers[slot] += 1
        return slot

    def unbook(self, slot: int) -> None:
        self._sharers[slot] -= 1
        if self._sharers[slot] == 0:
            self._vacant.append(slot)
