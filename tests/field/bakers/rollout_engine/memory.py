"""Decode lanes: a row of the batch together with its cache region."""
from __future__ import annotations

from typing import List, Optional


class Lane:
    __slots__ = ("row", "length", "capacity")

    def __init__(self, row: int, capacity: int) -> None:
        self.row = row
        self.length = 0
        self.capacity = capacity


class LanePool:
    """Lanes in two sizes; large ones are scarce."""

    def __init__(self, small: int, large: int) -> None:
        self._small: List[Lane] = [Lane(i, 128) for i in range(small)]
        self._large: List[Lane] = [Lane(small + i, 1024) for i in range(large)]
        self.busy = 0

    def checkout_lane(self, want: int) -> Optional[Lane]:
        rack = self._small if want <= 128 else self._large
        if not rack:
            return None
        self.busy += 1
        return rack.pop()

    def return_lane(self, lane: Lane) -> None:
        lane.length = 0
        self.busy -= 1
        (self._small if lane.capacity == 128 else self._large).append(lane)
