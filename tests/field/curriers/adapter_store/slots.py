"""Device slots that LoRA weights are copied into."""
from __future__ import annotations

from typing import Dict, List, Optional


class SlotsFull(RuntimeError):
    pass


class AdapterSlots:
    def __init__(self, n: int) -> None:
        self._free: List[int] = list(range(n))
        self.owner: Dict[int, str] = {}

    def reserve(self, adapter_id: str) -> int:
        if not self._free:
            raise SlotsFull(adapter_id)
        slot = self._free.pop(0)
        self.owner[slot] = adapter_id
        return slot

    def try_reserve(self, adapter_id: str) -> Optional[int]:
        try:
            return self.reserve(adapter_id)  # clean: handed to the caller
        except SlotsFull:
            return None

    def unreserve(self, slot: int) -> None:
        del self.owner[slot]
        self._free.append(slot)

    def swap(self, slot: int, adapter_id: str) -> int:
        self.unreserve(slot)
        return self.reserve(adapter_id)  # clean: handed to the caller in place of the old one
