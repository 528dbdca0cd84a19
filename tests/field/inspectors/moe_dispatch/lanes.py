"""Expert-parallel transport resources: ring lanes, events, per-rank credits."""
from collections import deque
from typing import Optional

import torch


class LaneRing:
    """Lanes are tried from a moving cursor; a flag marks the boarded ones."""

    def __init__(self, lanes: int) -> None:
        self.boarded = [False] * lanes
        self.cursor = 0

    def board(self) -> int:
        for step in range(len(self.boarded)):
            lane = (self.cursor + step) % len(self.boarded)
            if not self.boarded[lane]:
                self.boarded[lane] = True
                self.cursor = lane + 1
                return lane
        return -1

    def alight(self, lane: int) -> None:
        self.boarded[lane] = False


class EventBin:
    def __init__(self, count: int) -> None:
        self._spent = deque(torch.cuda.Event() for _ in range(count))

    def issue(self) -> torch.cuda.Event:
        while self._spent:
            event = self._spent.popleft()  # leak: events still pending are dropped from the bin
            if event.query():
                return event
        raise RuntimeError("event bin is empty")

    def recycle(self, event: torch.cuda.Event) -> None:
        self._spent.append(event)


class RankCredits:
    def __init__(self, ranks: int, each: int) -> None:
        self._left = torch.full((ranks,), each)

    def consume(self, rank: int, tokens: int) -> bool:
        if int(self._left[rank]) < tokens:
            return False
        self._left[rank] -= tokens
        return True

    def refund(self, rank: int, tokens: int) -> None:
        self._left[rank] += tokens


def board_pair(ring: LaneRing) -> Optional[tuple[int, int]]:
    """A lane for each micro-batch, or none at all."""
    even = ring.board()  # clean: near miss, alights when there is no second lane
    odd = ring.board()  # clean: returned with the first
    if odd < 0:
        if even >= 0:
            ring.alight(even)
        return None
    return even, odd
