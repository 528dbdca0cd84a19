from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass
class Entry:
    key: str
    vector: list[float]
    pins: int = 0


class VectorCache:
    """LRU; pinned entries are never evicted."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: OrderedDict[str, Entry] = OrderedDict()

    def pin(self, key: str) -> Entry | None:
        e = self._entries.get(key)
        if e is None:
            return None
        self._entries.move_to_end(key)
        e.pins += 1
        return e

    def unpin(self, e: Entry) -> None:
        e.pins -= 1

    def insert(self, key: str, vector: list[float]) -> None:
        if key in self._entries:
            self._entries[key].vector = vector
            return
        while len(self._entries) >= self.capacity:
            victim = next((k for k, e in self._entries.items() if e.pins == 0), None)
            if victim is None:
                return
            del self._entries[victim]
        self._entries[key] = Entry(key, vector)

    def lookup(self, keys: list[str]) -> tuple[list[Entry], list[str]]:
        """Pinned hits, and the keys that are missing. The caller unpins the hits."""
        hits: list[Entry] = []
        missing: list[str] = []
        for k in keys:
            e = self.pin(k)  # clean: returned to the caller with the hits
            if e is None:
                missing.append(k)
            else:
                hits.append(e)
        return hits, missing

    def dimension(self, key: str) -> int:
        e = self.pin(key)  # leak: the length is returned and the pin is never undone
        return len(e.vector) if e is not None else 0

    def norm(self, key: str) -> float:
        e = self.pin(key)  # clean: near miss, unpinned after the sum
        if e is None:
            return 0.0
        total = sum(x * x for x in e.vector)
        self.unpin(e)
        return total**0.5
