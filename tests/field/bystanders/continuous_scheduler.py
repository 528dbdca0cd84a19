"""Continuous batching: waiting -> running -> finished."""
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Deque, List, Optional

log = logging.getLogger("engine.scheduler")


class Status(Enum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2
    ABORTED = 3


class SlotPool:
    def __init__(self, n: int):
        self._slots = list(range(n))

    def take(self) -> Optional[int]:
        return self._slots.pop() if self._slots else None

    def give_back(self, slot: int) -> None:
        self._slots.append(slot)


@dataclass
class SchedulerConfig:
    max_seqs: int = 64
    max_prompt: int = 4096
    deadline_s: float = 30.0


@dataclass
class Request:
    rid: str
    prompt: List[int]
    arrived: float = field(default_factory=time.monotonic)
    status: Status = Status.WAITING
    slot: Optional[int] = None


class Scheduler:
    def __init__(self, cfg: SchedulerConfig):
        self.cfg = cfg
        self.slots = SlotPool(cfg.max_seqs)
        self.waiting: Deque[Request] = deque()
        self.running: List[Request] = []

    def submit(self, req: Request) -> None:
        self.waiting.append(req)

    def schedule(self) -> List[Request]:
        admitted = []
        while self.waiting:
            slot = self.slots.take()  # clean: near miss, break happens only when nothing was taken
            if slot is None:
                break
            req = self.waiting.popleft()
            req.slot = slot
            req.status = Status.RUNNING
            self.running.append(req)
            admitted.append(req)
        return admitted

    def schedule_priority(self, key) -> List[Request]:
        admitted = []
        for req in sorted(self.waiting, key=key):
            slot = self.slots.take()  # leak: over-long prompts are skipped after the slot was taken
            if slot is None:
                break
            if len(req.prompt) > self.cfg.max_prompt:
                req.status = Status.ABORTED
                continue
            req.slot = slot
            req.status = Status.RUNNING
            self.running.append(req)
            admitted.append(req)
        self.waiting = deque(r for r in self.waiting if r.status is Status.WAITING)
        return admitted

    def schedule_deadline(self, now: float) -> List[Request]:
        admitted, kept = [], deque()
        for req in self.waiting:
            if now - req.arrived > self.cfg.deadline_s:
                req.status = Status.ABORTED
                continue
            slot = self.slots.take()  # clean: near miss, the continue for None has nothing to give back
            if slot is None:
                kept.append(req)
                continue
            req.slot, req.status = slot, Status.RUNNING
            self.running.append(req)
            admitted.append(req)
        self.waiting = kept
        return admitted

    def resume(self, req: Request) -> bool:
        slot = self.slots.take()  # leak: an aborted request returns while the slot is still out
        if slot is None:
            return False
        if req.status is Status.ABORTED:
            log.info("%s was aborted while swapped out", req.rid)
            return False
        req.slot = slot
        self.running.append(req)
        return True

    def try_swap(self, victim: Request, req: Request) -> bool:
        """Replace victim by req in the batch, keeping both if there is room."""
        slot = self.slots.take()  # clean: stored on the request that joins running
        if slot is None:
            if victim.slot is None:
                return False
            self._drop(victim)
            self.waiting.appendleft(victim)
            slot = self.slots.take()  # clean: stored below, victim just gave one back
            if slot is None:
                return False
        req.slot = slot
        self.running.append(req)
        return True

    def reassign(self, req: Request) -> None:
        """Move a request to a lower slot so the batch stays dense."""
        new = self.slots.take()  # clean: near miss, the one swapped out of the field goes back
        if new is None:
            return
        if req.slot is not None and new > req.slot:
            self.slots.give_back(new)
            return
        old, req.slot = req.slot, new
        if old is not None:
            self.slots.give_back(old)

    def _drop(self, req: Request) -> None:
        self.running.remove(req)
        if req.slot is not None:
            self.slots.give_back(req.slot)
            req.slot = None
        req.status = Status.WAITING

    def finish(self, req: Request) -> None:
        self._drop(req)
        req.status = Status.FINISHED

    def has_room(self) -> bool:
        return self.slots.take() is not None  # leak: the probe keeps the slot it gets
