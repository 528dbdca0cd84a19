import logging

import torch
from torch import nn

from .slots import StateSlots

logger = logging.getLogger(__name__)


class StateMixer(nn.Module):
    def __init__(self, slots: StateSlots, dim: int):
        super().__init__()
        self.slots = slots
        self.inp = nn.Linear(dim, slots.ssm.shape[1])
        self.out = nn.Linear(slots.ssm.shape[1], dim)
        self.by_req = {}
        self.snapshots = []

    def slot_for(self, rid):
        if rid not in self.by_req:
            i = self.slots.alloc_slot()  # clean: near miss, PAD is refused and a real slot is stored under a new id
            if i == StateSlots.PAD:
                raise RuntimeError("no state slot")
            self.by_req[rid] = i
        return self.by_req[rid]

    def forget(self, rids):
        for r in rids:
            i = self.by_req.pop(r, None)
            if i is None:
                continue
            self.slots.dealloc_slot(i)

    def step(self, rid, x):
        i = self.slot_for(rid)  # clean: the slot belongs to the by_req table
        st = self.slots.ssm[i]
        st.mul_(0.9).add_(self.inp(x).detach())
        return self.out(st)

    def prefill_once(self, xs):
        i = self.slots.alloc_slot()  # clean: dealloc at the end, PAD returns early
        if i == StateSlots.PAD:
            return None
        st = self.slots.ssm[i]
        for x in xs:
            st.mul_(0.9).add_(self.inp(x).detach())
        y = self.out(st)
        self.slots.dealloc_slot(i)
        return y

    def prefill_until(self, xs, tol):
        i = self.slots.alloc_slot()  # leak: convergence returns out of the loop without dealloc
        if i == StateSlots.PAD:
            return None
        st = self.slots.ssm[i]
        for x in xs:
            before = st.clone()
            st.mul_(0.9).add_(self.inp(x).detach())
            if (st - before).norm() < tol:
                return self.out(st)
        y = self.out(st)
        self.slots.dealloc_slot(i)
        return y

    def checkpoint(self, rid):
        i = self.slots.alloc_slot()  # clean: goes on the snapshot stack, rollback and clear_snapshots dealloc it
        if i == StateSlots.PAD:
            return False
        self.slots.ssm[i].copy_(self.slots.ssm[self.by_req[rid]])
        self.snapshots.append(i)
        return True

    def rollback(self, rid):
        i = self.snapshots.pop()
        self.slots.ssm[self.by_req[rid]].copy_(self.slots.ssm[i])
        self.slots.dealloc_slot(i)

    def clear_snapshots(self):
        while self.snapshots:
            self.slots.dealloc_slot(self.snapshots.pop())

    def draft_states(self, rid, n):
        got = []
        for _ in range(n):
            j = self.slots.alloc_slot()  # leak: running out means None while the earlier ones stay claimed
            if j == StateSlots.PAD:
                logger.warning("no draft state, have %d of %d", len(got), n)
                return None
            self.slots.ssm[j].copy_(self.slots.ssm[self.by_req[rid]])
            got.append(j)
        return got

    def draft(self, rid, xs):
        states = self.draft_states(rid, len(xs))  # clean: every one is deallocated in the loop
        if states is None:
            return []
        ys = []
        for j, x in zip(states, xs):
            ys.append(self.out(self.slots.ssm[j] + self.inp(x)))
            self.slots.dealloc_slot(j)
        return ys

    def draft_accept(self, rid, xs, k):
        states = self.draft_states(rid, len(xs))  # leak: the states past k are not deallocated
        if not states:
            return 0
        for j in states[:k]:
            self.slots.ssm[self.by_req[rid]].copy_(self.slots.ssm[j])
            self.slots.dealloc_slot(j)
        return k

    def pick(self, limit):
        i = self.slots.alloc_zeroed(limit)  # clean: deallocated when real
        ok = i != StateSlots.PAD
        if ok:
            self.slots.dealloc_slot(i)
        return ok
