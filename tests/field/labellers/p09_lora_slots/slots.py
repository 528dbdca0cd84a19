"""Device slots for adapter weights, with a pin count per slot."""
from __future__ import annotations

from collections import OrderedDict
from typing import Dict, List, Optional


class SlotTable:
    def __init__(self, count: int) -> None:
        self.vacant: List[int] = list(range(count))
        self.by_name: "OrderedDict[str, int]" = OrderedDict()
        self.pins: Dict[int, int] = {}

    def reserve(self) -> Optional[int]:
        if not self.vacant:
            return None
        slot = self.vacant.pop()  # clean: pool body, returned to the caller
        self.pins[slot] = 0
        return slot

    def unreserve(self, slot: int) -> None:
        del self.pins[slot]
        self.vacant.append(slot)

    def pin(self, slot: int) -> int:
        self.pins[slot] += 1
        return slot

    def unpin(self, slot: int) -> None:
        self.pins[slot] -= 1

    def compact(self, floor: int) -> int:
        """Reorder the vacant slots so that the low ones are used first."""
        kept: List[int] = []
        while self.vacant:
            slot = self.vacant.pop()  # clean: near miss, every branch puts the slot in kept, which becomes the vacant list
            if slot < floor:
                kept.append(slot)
            else:
                kept.insert(0, slot)
        self.vacant = kept
        return len(kept)
