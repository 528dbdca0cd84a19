"""Registered memory ring and the table of transfer handles."""
from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass
class Segment:
    start: int
    size: int
    live: bool = True


class RegisteredRing:
    """Segments may be returned in any order; the tail moves over those returned."""

    def __init__(self, size: int):
        self.size = size
        self.head = 0
        self.tail = 0
        self._order: list[Segment] = []

    def carve(self, size: int) -> Segment | None:
        if self.head - self.tail + size > self.size:
            return None
        seg = Segment(self.head, size)
        self.head += size
        self._order.append(seg)
        return seg

    def retire(self, seg: Segment) -> None:
        seg.live = False
        while self._order and not self._order[0].live:
            self.tail += self._order.pop(0).size


class HandleTable:
    def __init__(self, limit: int):
        self.limit = limit
        self._open: set[int] = set()
        self._next = itertools.count(1)

    def open_handle(self) -> int:
        """Handle or 0 when the table is full."""
        if len(self._open) >= self.limit:
            return 0
        handle = next(self._next)
        self._open.add(handle)
        return handle

    def close_handle(self, handle: int) -> None:
        self._open.discard(handle)
