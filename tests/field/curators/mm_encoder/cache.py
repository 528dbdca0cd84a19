from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Dict, Optional

import torch


@dataclass
class FeatureEntry:
    mm_hash: str
    tokens: int
    refs: int = 0
    features: Optional[torch.Tensor] = None


class EncoderCache:
    """Space is counted in feature tokens. Entries without references may be evicted."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reserved = 0
        self.entries: Dict[str, FeatureEntry] = {}
        self.evictable: "OrderedDict[str, FeatureEntry]" = OrderedDict()

    def _make_room(self, tokens: int) -> bool:
        while self.reserved + tokens > self.capacity and self.evictable:
            mm_hash, entry = self.evictable.popitem(last=False)
            del self.entries[mm_hash]
            self.reserved -= entry.tokens
        return self.reserved + tokens <= self.capacity

    def open_entry(self, mm_hash: str, tokens: int) -> Optional[FeatureEntry]:
        """Returns the entry with one reference for the caller."""
        entry = self.entries.get(mm_hash)
        if entry is None:
            if not self._make_room(tokens):
                return None
            entry = FeatureEntry(mm_hash, tokens)
            self.entries[mm_hash] = entry
            self.reserved += tokens
        self.evictable.pop(mm_hash, None)
        entry.refs += 1
        return entry

    def ref(self, entry: FeatureEntry) -> FeatureEntry:
        self.evictable.pop(entry.mm_hash, None)
        entry.refs += 1
        return entry

    def unref(self, entry: FeatureEntry) -> None:
        entry.refs -= 1
        if entry.refs == 0:
            self.evictable[entry.mm_hash] = entry

    def lookup(self, mm_hash: str) -> Optional[FeatureEntry]:
        entry = self.entries.get(mm_hash)
        if entry is None or entry.features is None:
            return None
        return self.ref(entry)  # clean: handed on to the caller with its reference
