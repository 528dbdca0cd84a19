"""Hash-keyed encoder outputs with a reader count."""
from __future__ import annotations

import threading
from typing import Dict, List, Optional

from .arena import EmbeddingArena, Segment


class Entry:
    def __init__(self, key: str, seg: Segment) -> None:
        self.key = key
        self.seg = seg
        self.readers = 0


class EncoderCache:
    def __init__(self, arena: EmbeddingArena) -> None:
        self.arena = arena
        self.entries: Dict[str, Entry] = {}
        self._lock = threading.RLock()

    def attach(self, key: str) -> Optional[Entry]:
        with self._lock:
            entry = self.entries.get(key)
            if entry is not None:
                entry.readers += 1
            return entry

    def detach(self, entry: Entry) -> None:
        with self._lock:
            entry.readers -= 1

    def make_room(self, rows: int) -> None:
        with self._lock:
            for key in [k for k, e in self.entries.items() if e.readers == 0]:
                self.arena.uncarve(self.entries.pop(key).seg)
                probe = self.arena.carve(rows)  # clean: near miss, only a probe, goes straight back
                if probe is not None:
                    self.arena.uncarve(probe)
                    return

    def create(self, key: str, rows: int) -> Optional[Entry]:
        """Adds an entry, attached for the caller."""
        seg = self.arena.carve(rows)  # leak: an entry that another thread added first is returned and seg dropped
        if seg is None:
            self.make_room(rows)
            seg = self.arena.carve(rows)  # leak: the same race drops the second try
        if seg is None:
            return None
        with self._lock:
            present = self.attach(key)  # clean: returned to the caller
            if present is not None:
                return present
            entry = Entry(key, seg)
            entry.readers = 1
            self.entries[key] = entry
            return entry

    def get_or_create(self, key: str, rows: int) -> Optional[Entry]:
        entry = self.attach(key)  # clean: returned to the caller
        if entry is not None:
            return entry
        return self.create(key, rows)  # clean: returned to the caller

    def purge(self, keys: List[str]) -> int:
        n = 0
        for key in keys:
            if not self._lock.acquire(timeout=0.1):  # leak: an entry with readers goes on to the next key without the release
                continue
            entry = self.entries.get(key)
            if entry is not None and entry.readers:
                continue
            if entry is not None:
                self.arena.uncarve(self.entries.pop(key).seg)
                n += 1
            self._lock.release()
        return n
