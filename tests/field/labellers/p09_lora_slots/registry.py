"""Adapters loaded into slots; wraps the slot table."""
from __future__ import annotations

from typing import Dict, Optional

from .slots import SlotTable


class AdapterRegistry:
    def __init__(self, table: SlotTable, weights: Dict[str, bytes]) -> None:
        self.table = table
        self.weights = weights
        self.device: Dict[int, bytes] = {}

    def _evict_one(self) -> bool:
        for name, slot in list(self.table.by_name.items()):
            if self.table.pins[slot] == 0:
                del self.table.by_name[name]
                self.table.unreserve(slot)
                return True
        return False

    def load(self, name: str) -> Optional[int]:
        slot = self.table.by_name.get(name)
        if slot is not None:
            return slot
        slot = self.table.reserve()  # clean: near miss, reserved again only when the first gave None
        if slot is None and self._evict_one():
            slot = self.table.reserve()  # leak: unknown adapter returns None with the slot reserved
            if name not in self.weights:
                return None
        if slot is None:
            return None
        self.device[slot] = self.weights.get(name, b"")
        self.table.by_name[name] = slot
        return slot

    def replace(self, name: str, blob: bytes) -> bool:
        slot = self.table.reserve()  # leak: by_name forgets the older slot of this adapter, which stays reserved
        if slot is None:
            return False
        self.weights[name] = blob
        self.device[slot] = blob
        self.table.by_name[name] = slot
        return True

    def acquire(self, name: str) -> Optional[int]:
        slot = self.load(name)  # clean: resident in by_name, evicted or unloaded later
        if slot is None:
            return None
        return self.table.pin(slot)  # clean: the pin is handed to the caller

    def release(self, slot: int) -> None:
        self.table.unpin(slot)

    def unload(self, name: str) -> None:
        slot = self.table.by_name.pop(name, None)
        if slot is not None:
            self.device.pop(slot, None)
            self.table.unreserve(slot)
