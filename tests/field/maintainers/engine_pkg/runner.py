"""Model runner: warm-up and one-off passes outside the scheduler."""
from __future__ import annotations

from typing import Dict, List, Optional

import torch

from .pool import StatePool, StateSlot
from .scheduler import Request, Scheduler


class Runner:
    def __init__(self, pool: StatePool, scheduler: Scheduler, width: int, capacity: int):
        self.pool = pool
        self.scheduler = scheduler
        self.state = torch.zeros(capacity, width)
        self.dummy: Optional[StateSlot] = None
        self.beams: Dict[str, List[StateSlot]] = {}

    def warm(self, fills: List[float]) -> None:
        for value in fills:
            self.dummy = self.pool.obtain("dummy")  # leak: each further round overwrites dummy without restoring it
            if self.dummy is not None:
                self.state[self.dummy.index].fill_(value)

    def cool(self) -> None:
        if self.dummy is not None:
            self.pool.restore(self.dummy)
            self.dummy = None

    def score_once(self, x: torch.Tensor) -> Optional[float]:
        slot = self.pool.obtain("score")  # clean: restored before the result is computed from a clone
        if slot is None:
            return None
        self.state[slot.index].copy_(x)
        row = self.state[slot.index].clone()
        self.pool.restore(slot)
        return float(row.sum())

    def embed(self, x: torch.Tensor, normalize: bool) -> Optional[torch.Tensor]:
        slot = self.pool.obtain("embed")  # leak: the normalised result is returned before restore
        if slot is None:
            return None
        self.state[slot.index].copy_(x)
        row = self.state[slot.index].clone()
        if normalize:
            return row / row.norm()
        self.pool.restore(slot)
        return row

    def open_beams(self, rid: str, n: int) -> bool:
        if rid in self.beams:
            return False
        group: List[StateSlot] = []
        for i in range(n):
            slot = self.pool.obtain(f"{rid}/{i}")  # leak: when the pool runs short the group so far is not restored
            if slot is None:
                return False
            group.append(slot)
        self.beams[rid] = group
        return True

    def close_beams(self, rid: str) -> None:
        for slot in self.beams.pop(rid, []):
            self.pool.restore(slot)

    def run_single(self, req: Request, x: torch.Tensor) -> Optional[torch.Tensor]:
        if not self.scheduler.admit_urgent(req):  # clean: near miss, complete restores the slot in the finally
            return None
        try:
            self.state[req.slot.index].copy_(x)
            if not torch.isfinite(x).all():
                return None
            return self.state[req.slot.index].clone()
        finally:
            self.scheduler.complete(req.rid)
