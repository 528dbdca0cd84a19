"""Copy lanes: a stream with an event, for one direction."""
from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Iterator, Optional

import torch


class Lane:
    def __init__(self, device: int):
        self.stream = torch.cuda.Stream(device)
        self.event = torch.cuda.Event()

    def record(self) -> None:
        self.event.record(self.stream)

    def idle(self) -> bool:
        return self.event.query()


class CopyLanes:
    def __init__(self, device: int, n: int):
        self._lanes = [Lane(device) for _ in range(n)]
        self._sem = threading.Semaphore(n)

    def enter_lane(self) -> Lane:
        self._sem.acquire()  # clean: released by leave_lane() together with the lane
        return self._lanes.pop()  # clean: returned to the caller

    def enter_idle_lane(self) -> Optional[Lane]:
        self._sem.acquire()  # leak: no release when no lane is idle
        for i, lane in enumerate(self._lanes):
            if lane.idle():
                return self._lanes.pop(i)  # clean: returned to the caller
        return None

    def leave_lane(self, lane: Lane) -> None:
        self._lanes.append(lane)
        self._sem.release()

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        lane = self.enter_lane()  # clean: left in finally
        try:
            yield lane
        finally:
            self.leave_lane(lane)
