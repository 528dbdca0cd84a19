from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch


@dataclass
class ExpertSlot:
    index: int
    weight: torch.Tensor
    pins: int = 0


class ExpertCache:
    """Device-resident experts; a pinned expert is never evicted."""

    def __init__(self, slots: int, shape: tuple[int, int]) -> None:
        self._vacant = [ExpertSlot(i, torch.empty(shape)) for i in range(slots)]
        self._resident: OrderedDict[tuple[int, int], ExpertSlot] = OrderedDict()

    def pin(self, layer: int, expert: int) -> ExpertSlot | None:
        slot = self._resident.get((layer, expert))
        if slot is None:
            return None
        slot.pins += 1
        self._resident.move_to_end((layer, expert))
        return slot

    def unpin(self, slot: ExpertSlot) -> None:
        slot.pins -= 1

    def take_vacant(self) -> ExpertSlot | None:
        if self._vacant:
            return self._vacant.pop()
        for key, slot in self._resident.items():
            if slot.pins == 0:
                return self._resident.pop(key)
        return None

    def return_vacant(self, slot: ExpertSlot) -> None:
        self._vacant.append(slot)

    def install(self, layer: int, expert: int, slot: ExpertSlot) -> None:
        if (layer, expert) in self._resident:
            self.return_vacant(slot)
            return
        self._resident[(layer, expert)] = slot
