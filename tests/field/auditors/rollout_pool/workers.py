from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Optional


@dataclass
class RolloutWorker:
    rank: int
    version: int = 0
    alive: bool = True

    def generate(self, prompt: str) -> str:
        if not self.alive:
            raise ConnectionError(self.rank)
        return f"{prompt}@{self.version}"


class WorkerPool:
    def __init__(self, size: int) -> None:
        self._idle: deque[RolloutWorker] = deque(RolloutWorker(i) for i in range(size))

    def lease(self) -> Optional[RolloutWorker]:
        return self._idle.popleft() if self._idle else None

    def lease_version(self, version: int) -> Optional[RolloutWorker]:
        for _ in range(len(self._idle)):
            worker = self._idle.popleft()  # clean: near miss, a worker of another version goes back to the end of the queue
            if worker.version == version:
                return worker
            self._idle.append(worker)
        return None

    def lease_group(self, count: int) -> list[RolloutWorker]:
        group: list[RolloutWorker] = []
        while len(group) < count:
            worker = self.lease()  # leak: a group that comes up short is answered with an empty list, its workers forgotten
            if worker is None:
                return []
            group.append(worker)
        return group

    def unlease(self, worker: RolloutWorker) -> None:
        self._idle.append(worker)
