from __future__ import annotations

import os
from typing import Dict, Iterable, List, Optional

from .slots import AdapterSlot, AdapterSlots


class AdapterCorrupt(Exception):
    pass


class AdapterLoader:
    def __init__(self, slots: AdapterSlots, directory: str) -> None:
        self.slots = slots
        self.directory = directory
        self.failed: Dict[str, str] = {}

    def _read(self, name: str) -> bytes:
        with open(os.path.join(self.directory, name + ".bin"), "rb") as f:  # clean: with
            blob = f.read()
        if not blob.startswith(b"LORA"):
            raise AdapterCorrupt(name)
        return blob[4:]

    def acquire(self, name: str) -> Optional[AdapterSlot]:
        """A pinned slot with weights in it, or None."""
        slot = self.slots.pin(name)  # clean: near miss, unpinned on a corrupt file, returned otherwise
        if slot is None:
            return None
        if slot.weights:
            return slot
        try:
            slot.weights = self._read(name)
        except (OSError, AdapterCorrupt) as exc:
            self.failed[name] = repr(exc)
            self.slots.unpin(slot)
            return None
        return slot

    def release(self, slot: AdapterSlot) -> None:
        self.slots.unpin(slot)

    def reload(self, name: str) -> bool:
        slot = self.slots.pin(name)  # leak: a corrupt file is caught and returns False while pinned
        if slot is None:
            return False
        try:
            slot.weights = self._read(name)
        except (OSError, AdapterCorrupt) as exc:
            self.failed[name] = repr(exc)
            return False
        self.slots.unpin(slot)
        return True

    def preload(self, names: Iterable[str]) -> List[str]:
        loaded = []
        for name in names:
            slot = self.acquire(name)  # clean: near miss, continue only for None
            if slot is None:
                continue
            loaded.append(name)
            self.release(slot)
        return loaded

    def size_of(self, name: str) -> int:
        slot = self.acquire(name)  # leak: the pin outlives the size lookup
        return len(slot.weights) if slot else 0
