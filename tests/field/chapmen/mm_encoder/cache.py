"""Cache of image and audio embeddings whose entries are pinned while used."""
from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Dict, List, Optional

import torch


@dataclass
class Entry:
    key: str
    embedding: torch.Tensor
    slots: int
    pins: int = 0


class EncoderCache:
    """LRU over entries; an entry is evictable while nobody pins it."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.used = 0
        self._entries: "OrderedDict[str, Entry]" = OrderedDict()

    def pin(self, key: str) -> Optional[Entry]:
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.pins += 1
        self._entries.move_to_end(key)
        return entry

    def unpin(self, entry: Entry) -> None:
        entry.pins -= 1

    def insert_pinned(self, key: str, embedding: torch.Tensor) -> Optional[Entry]:
        known = self.pin(key)  # clean: handed on when the key is known
        if known is not None:
            return known
        slots = int(embedding.shape[0])
        if not self._make_room(slots):
            return None
        entry = Entry(key, embedding, slots, pins=1)
        self._entries[key] = entry
        self.used += slots
        return entry

    def _make_room(self, slots: int) -> bool:
        for key in list(self._entries):
            if self.used + slots <= self.slots:
                break
            if self._entries[key].pins == 0:
                self.used -= self._entries.pop(key).slots
        return self.used + slots <= self.slots

    def pin_all(self, keys: List[str]) -> Optional[List[Entry]]:
        pinned: List[Entry] = []
        for key in keys:
            entry = self.pin(key)  # clean: handed on in the list, or unpinned when one key is missing
            if entry is None:
                break
            pinned.append(entry)
        else:
            return pinned
        for entry in pinned:
            self.unpin(entry)
        return None

    def pin_present(self, keys: List[str]) -> Dict[str, Entry]:
        found = {key: self.pin(key) for key in keys}  # clean: near miss, those not None are handed on
        return {key: entry for key, entry in found.items() if entry is not None}

    def total_slots(self, keys: List[str]) -> int:
        """Slots of all keys, -1 when one of them is not in the cache."""
        total = 0
        for key in keys:
            entry = self.pin(key)  # leak: summed up, never unpinned
            if entry is None:
                return -1
            total += entry.slots
        return total
