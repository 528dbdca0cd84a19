from __future__ import annotations

from typing import Optional

from .models import Assignment, Worker


class WorkerPark:
    """Each worker has a number of lanes; an assignment is one lane of one worker."""

    def __init__(self, workers: list[Worker], lanes: int) -> None:
        self._lanes: dict[str, list[int]] = {w.addr: list(range(lanes)) for w in workers}
        self._workers = {w.addr: w for w in workers}

    def assign(self, region: str) -> Optional[Assignment]:
        candidates = [w for w in self._workers.values() if w.region == region and self._lanes[w.addr]]
        if not candidates:
            return None
        worker = min(candidates, key=lambda w: w.load)
        lane = self._lanes[worker.addr].pop()  # clean: leaves in the assignment
        return Assignment(worker, lane)

    def assign_to(self, addr: str) -> Optional[Assignment]:
        lanes = self._lanes.get(addr)
        if not lanes:
            return None
        lane = lanes.pop(0)  # leak: for a draining worker the lane is popped and None returned
        worker = self._workers[addr]
        if worker.draining:
            return None
        return Assignment(worker, lane)

    def unassign(self, a: Assignment) -> None:
        self._lanes[a.worker.addr].append(a.lane)
