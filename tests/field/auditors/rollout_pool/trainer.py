from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Optional

from .weights import VersionPins, WeightSync
from .workers import RolloutWorker, WorkerPool


@dataclass
class Trajectory:
    text: str
    version: int


class RolloutTrainer:
    def __init__(self, pool: WorkerPool, pins: VersionPins, sync: WeightSync) -> None:
        self.pool = pool
        self.pins = pins
        self.sync = sync
        self.busy: dict[str, RolloutWorker] = {}
        self.replay: deque[Trajectory] = deque()

    def dispatch(self, prompt: str) -> bool:
        if prompt in self.busy:
            return False
        worker = self.pool.lease()  # clean: near miss, a dead worker is unleased in collect() just like one that answers
        if worker is None:
            return False
        self.busy[prompt] = worker
        return True

    def collect(self) -> int:
        done = 0
        for prompt in list(self.busy):
            worker = self.busy.pop(prompt)
            try:
                text = worker.generate(prompt)
            except ConnectionError:
                self.pool.unlease(worker)
                continue
            version = self.pins.pin(worker.version)  # leak: sample() unpins a trajectory but trim() drops the oldest ones pinned
            self.replay.append(Trajectory(text, version))
            self.pool.unlease(worker)
            done += 1
        return done

    def sample(self) -> Optional[str]:
        if not self.replay:
            return None
        item = self.replay.pop()
        self.pins.unpin(item.version)
        return item.text

    def trim(self, keep: int) -> None:
        while len(self.replay) > keep:
            self.replay.popleft()

    def rollout_group(self, prompt: str, n: int) -> list[str]:
        group = self.pool.lease_group(n)  # clean: near miss, each worker of the group is unleased in the finally of its round
        out: list[str] = []
        for worker in group:
            try:
                out.append(worker.generate(prompt))
            except ConnectionError:
                continue
            finally:
                self.pool.unlease(worker)
        return out

    def best_of(self, prompt: str, n: int) -> Optional[str]:
        group = self.pool.lease_group(n)  # leak: the loop breaks at the first long answer and the workers after it are not unleased
        best: Optional[str] = None
        for worker in group:
            best = worker.generate(prompt) if worker.alive else best
            self.pool.unlease(worker)
            if best is not None and len(best) > 80:
                break
        return best

    def evaluate(self, prompts: list[str]) -> int:
        worker = self.pool.lease_version(self.sync.published or 0)  # leak: a connection error is handled by returning what was scored so far
        if worker is None:
            return 0
        scored = 0
        try:
            for prompt in prompts:
                worker.generate(prompt)
                scored += 1
        except ConnectionError:
            return scored
        self.pool.unlease(worker)
        return scored

    def refresh(self, version: int) -> bool:
        worker = self.pool.lease()  # clean: near miss, unleased on both sides of the version check
        if worker is None:
            return False
        if worker.version >= version:
            self.pool.unlease(worker)
            return False
        worker.version = version
        self.pool.unlease(worker)
        return True

    def freeze_reference(self, version: int, steps: int) -> int:
        hold = steps > 0
        if hold:
            self.pins.pin(version)  # leak: a run cut down to zero steps clears the flag that guards the unpin
        budget = min(steps, len(self.replay))
        hold = budget > 0
        for step in range(budget):
            self.sync.publish(version + step + 1)
        if hold:
            self.pins.unpin(version)
        return budget
