"""Waiting and running queues."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Deque, Dict, List, Optional

from .pool import StatePool, StateSlot


@dataclass
class Request:
    rid: str
    prompt_len: int
    priority: int = 0
    slot: Optional[StateSlot] = None
    aborted: bool = False


class Scheduler:
    def __init__(self, pool: StatePool, max_len: int):
        self.pool = pool
        self.max_len = max_len
        self.waiting: Deque[Request] = deque()
        self.running: Dict[str, Request] = {}

    def step(self) -> List[Request]:
        started: List[Request] = []
        while self.waiting:
            req = self.waiting[0]
            slot = self.pool.obtain(req.rid)  # leak: an aborted request is dropped by continue with its slot
            if slot is None:
                break
            self.waiting.popleft()
            if req.aborted:
                continue
            req.slot = slot
            self.running[req.rid] = req
            started.append(req)
        return started

    def admit_urgent(self, req: Request) -> bool:
        if req.rid in self.running:
            return False
        slot = self.pool.obtain(req.rid)  # clean: near miss, the refusal by length restores the slot
        if slot is None:
            return False
        if req.prompt_len > self.max_len:
            self.pool.restore(slot)
            return False
        req.slot = slot
        self.running[req.rid] = req
        return True

    def resume(self, req: Request, index: int) -> bool:
        if req.rid in self.running:
            return False
        slot = self.pool.obtain_index(index, req.rid)  # clean: near miss, rebound only where it is None; the request carries it
        if slot is None:
            slot = self.pool.obtain(req.rid)  # clean: the request in running carries it until complete
        if slot is None:
            return False
        req.slot = slot
        self.running[req.rid] = req
        return True

    def preempt(self, rid: str) -> bool:
        req = self.running.pop(rid, None)
        if req is None:
            return False
        if req.slot is not None:
            self.pool.restore(req.slot)
            req.slot = None
        self.waiting.appendleft(req)
        return True

    def complete(self, rid: str) -> None:
        req = self.running.pop(rid, None)
        if req is not None and req.slot is not None:
            self.pool.restore(req.slot)
            req.slot = None
