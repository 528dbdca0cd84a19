"""Encoder outputs of images and audio in a fixed number of embedding slots."""
from __future__ import annotations

from typing import Dict, List, Optional


class EmbedCache:
    def __init__(self, slots: int) -> None:
        self._free: List[int] = list(range(slots))
        self._rows: Dict[int, List[int]] = {}
        self._uses: Dict[int, int] = {}

    @property
    def available(self) -> int:
        return len(self._free)

    def lease(self) -> Optional[int]:
        if not self._free:
            return None
        slot = self._free.pop()
        self._uses[slot] = 1
        return slot

    def addref(self, slot: int) -> None:
        self._uses[slot] += 1

    def unlease(self, slot: int) -> None:
        self._uses[slot] -= 1
        if self._uses[slot] == 0:
            self._rows.pop(slot, None)
            self._free.append(slot)

    def store(self, slot: int, row: List[int]) -> None:
        self._rows[slot] = row

    def row(self, slot: int) -> List[int]:
        return self._rows[slot]
