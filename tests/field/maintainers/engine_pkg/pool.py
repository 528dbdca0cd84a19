"""Sequence-state slots with shared ownership."""
from __future__ import annotations

from typing import Dict, List, Optional


class StateSlot:
    __slots__ = ("index", "owner")

    def __init__(self, index: int):
        self.index = index
        self.owner: Optional[str] = None


class StatePool:
    def __init__(self, capacity: int, watermark: int = 1):
        self._available: List[StateSlot] = [StateSlot(i) for i in range(capacity)]
        self._in_use: Dict[int, StateSlot] = {}
        self.watermark = watermark

    def obtain(self, owner: str) -> Optional[StateSlot]:
        if len(self._available) <= self.watermark:
            return None
        slot = self._available.pop()  # clean: returned; _in_use is only a register of what is out
        slot.owner = owner
        self._in_use[slot.index] = slot
        return slot

    def obtain_index(self, index: int, owner: str) -> Optional[StateSlot]:
        """The slot with this very index, if it is free."""
        for pos, cand in enumerate(self._available):
            if cand.index == index:
                slot = self._available.pop(pos)  # clean: near miss, None is returned only if no candidate was popped
                slot.owner = owner
                self._in_use[index] = slot
                return slot
        return None

    def restore(self, slot: StateSlot) -> None:
        self._in_use.pop(slot.index, None)
        slot.owner = None
        self._available.append(slot)
