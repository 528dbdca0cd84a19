from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Optional

import torch


class Phase(Enum):
    PREFILL = 0
    DECODE = 1
    DONE = 2


class StateSlotPool:
    def __init__(self, num_slots: int, conv_dim: int, ssm_dim: int) -> None:
        self.conv = torch.zeros(num_slots, conv_dim)
        self.ssm = torch.zeros(num_slots, ssm_dim)
        self._free: deque[int] = deque(range(num_slots))
        self._retired: set[int] = set()

    def alloc_slot(self) -> Optional[int]:
        while self._free:
            slot = self._free.popleft()  # clean: near miss, only retired slots are passed over, and those are meant to stay out
            if slot not in self._retired:
                return slot
        return None

    def alloc_zeroed(self) -> Optional[int]:
        for _ in range(len(self._free)):
            slot = self._free.popleft()  # leak: a slot whose state is not finite is skipped and never put back
            if not torch.isfinite(self.ssm[slot]).all():
                continue
            self.conv[slot].zero_()
            self.ssm[slot].zero_()
            return slot
        return None

    def free_slot(self, slot: int) -> None:
        self._free.append(slot)

    def retire(self, slot: int) -> None:
        self._retired.add(slot)

    def copy(self, src: int, dst: int) -> None:
        self.conv[dst].copy_(self.conv[src])
        self.ssm[dst].copy_(self.ssm[src])


@dataclass
class HybridRequest:
    rid: int
    prompt_len: int
    phase: Phase = Phase.PREFILL
    computed: int = 0
    slot: Optional[int] = None
    checkpoints: dict[int, int] = field(default_factory=dict)


class HybridScheduler:
    def __init__(self, pool: StateSlotPool, chunk: int, ckpt_every: int) -> None:
        self.pool = pool
        self.chunk = chunk
        self.ckpt_every = ckpt_every
        self.waiting: deque[HybridRequest] = deque()
        self.running: list[HybridRequest] = []

    def schedule(self, budget: int) -> list[tuple[HybridRequest, int]]:
        plan: list[tuple[HybridRequest, int]] = []
        for req in self.running:
            n = 1 if req.phase is Phase.DECODE else min(self.chunk, req.prompt_len - req.computed)
            if n > budget:
                break
            plan.append((req, n))
            budget -= n
        while self.waiting and budget > 0:
            req = self.waiting[0]
            slot = self.pool.alloc_zeroed()  # leak: a first chunk that exceeds the budget breaks out with the slot in a local
            if slot is None:
                break
            n = min(self.chunk, req.prompt_len)
            if n > budget:
                break
            self.waiting.popleft()
            req.slot = slot
            self.running.append(req)
            plan.append((req, n))
            budget -= n
        return plan

    def resume(self, req: HybridRequest) -> bool:
        if not req.checkpoints:
            return False
        if req.slot is None:
            req.slot = self.pool.alloc_slot()  # clean: near miss, only where the request has none, which preempt had freed
        if req.slot is None:
            return False
        at = max(req.checkpoints)
        self.pool.copy(req.checkpoints[at], req.slot)
        req.computed = at
        self.waiting.remove(req)
        self.running.append(req)
        return True

    def advance(self, req: HybridRequest, n: int) -> None:
        before = req.computed // self.ckpt_every
        req.computed += n
        if req.computed >= req.prompt_len:
            req.phase = Phase.DECODE
        if req.computed // self.ckpt_every > before:
            self.checkpoint(req)

    def checkpoint(self, req: HybridRequest) -> None:
        if req.slot is None or req.computed in req.checkpoints:
            return
        slot = self.pool.alloc_slot()  # clean: near miss, a position that has one returns before, and finish and abort empty the dict
        if slot is None:
            return
        self.pool.copy(req.slot, slot)
        req.checkpoints[req.computed] = slot

    def _drop_checkpoints(self, req: HybridRequest) -> None:
        while req.checkpoints:
            _, slot = req.checkpoints.popitem()
            self.pool.free_slot(slot)

    def preempt(self, req: HybridRequest) -> None:
        self.running.remove(req)
        if req.slot is not None:
            self.pool.free_slot(req.slot)
            req.slot = None
        req.computed, req.phase = 0, Phase.PREFILL
        self.waiting.appendleft(req)

    def finish(self, req: HybridRequest) -> None:
        req.phase = Phase.DONE
        self.running.remove(req)
        self._drop_checkpoints(req)
        if req.slot is not None:
            self.pool.free_slot(req.slot)
            req.slot = None

    def abort(self, rid: int) -> None:
        for req in list(self.running):
            if req.rid == rid:
                self.finish(req)
                return
        for req in list(self.waiting):
            if req.rid == rid:
                self.waiting.remove(req)
                self._drop_checkpoints(req)


def fork_samples(pool: StateSlotPool, parent: HybridRequest, n: int) -> list[HybridRequest]:
    children: list[HybridRequest] = []
    for i in range(n):
        slot = pool.alloc_slot()  # clean: near miss, what was forked so far is returned, each child with its slot
        if slot is None:
            break
        pool.copy(parent.slot, slot)
        children.append(HybridRequest(parent.rid * 1000 + i, parent.prompt_len, parent.phase, parent.computed, slot))
    return children


def fork_exact(pool: StateSlotPool, parent: HybridRequest, n: int) -> list[HybridRequest]:
    children: list[HybridRequest] = []
    for i in range(n):
        slot = pool.alloc_slot()  # leak: the children made before the shortage are thrown away with their slots
        if slot is None:
            return []
        pool.copy(parent.slot, slot)
        children.append(HybridRequest(parent.rid * 1000 + i, parent.prompt_len, parent.phase, parent.computed, slot))
    return children


def rollback_verify(pool: StateSlotPool, req: HybridRequest, accepted: int, drafted: int) -> bool:
    backup = pool.alloc_slot()  # leak: full acceptance returns early and keeps the backup
    if backup is None:
        return False
    pool.copy(req.slot, backup)
    req.computed += drafted
    if accepted == drafted:
        return True
    pool.copy(backup, req.slot)
    req.computed -= drafted - accepted
    pool.free_slot(backup)
    return True


def swap_states(pool: StateSlotPool, a: HybridRequest, b: HybridRequest) -> bool:
    tmp = pool.alloc_slot()  # clean: near miss, becomes b's slot and b's old one is freed in its place
    if tmp is None:
        return False
    pool.copy(a.slot, tmp)
    pool.copy(b.slot, a.slot)
    old, b.slot = b.slot, tmp
    pool.free_slot(old)
    return True
