"""Recurrent state slots for Mamba style models, one slot per live request."""
from __future__ import annotations

import dataclasses
import logging
from typing import Iterable, Mapping

import torch

logger = logging.getLogger("mamba.state")


class StateSlots:
    def __init__(self, n: int) -> None:
        self._free: set[int] = set(range(n))

    def __len__(self) -> int:
        return len(self._free)

    def assign(self) -> int:
        if not self._free:
            raise LookupError("no state slot left")
        return self._free.pop()

    def unassign(self, slot: int) -> None:
        if slot in self._free:
            raise ValueError(f"slot {slot} is free already")
        self._free.add(slot)


@dataclasses.dataclass
class Request:
    rid: str
    slot: int = -1
    draft_slot: int = -1
    priority: int = 0
    done: bool = False


class MambaStateManager:
    def __init__(self, slots: StateSlots, conv: torch.Tensor, ssm: torch.Tensor) -> None:
        self.slots = slots
        self.conv = conv
        self.ssm = ssm
        self.requests: dict[str, Request] = {}
        self.parked: list[int] = []

    def add(self, req: Request) -> None:
        req.slot = self.slots.assign()  # clean: remove() unassigns the request's slot
        self.conv[req.slot].zero_()
        self.ssm[req.slot].zero_()
        self.requests[req.rid] = req

    def add_speculative(self, req: Request) -> None:
        req.slot = self.slots.assign()  # clean: remove() unassigns the request's slot
        req.draft_slot = self.slots.assign()  # leak: remove() only knows the main slot
        self.requests[req.rid] = req

    def add_all(self, reqs: Iterable[Request]) -> list[Request]:
        rejected = []
        for req in reqs:
            if len(self.slots) == 0:
                rejected.append(req)
                continue
            req.slot = self.slots.assign()  # clean: near miss, the full case is handled before the assign
            self.requests[req.rid] = req
        return rejected

    def add_prioritised(self, reqs: Iterable[Request], floor: int) -> list[Request]:
        accepted = []
        for req in reqs:
            req.slot = self.slots.assign()  # leak: low priority requests are skipped after the slot was assigned
            if req.priority < floor:
                logger.debug("%s below floor", req.rid)
                continue
            self.requests[req.rid] = req
            accepted.append(req)
        return accepted

    def fork(self, rid: str, new_rid: str) -> Request:
        parent = self.requests[rid]
        slot = self.slots.assign()  # clean: owned by the child entered in the table
        self.conv[slot].copy_(self.conv[parent.slot])
        self.ssm[slot].copy_(self.ssm[parent.slot])
        child = Request(new_rid, slot, priority=parent.priority)
        self.requests[new_rid] = child
        return child

    def fork_n(self, rid: str, n: int) -> list[int]:
        parent = self.requests[rid]
        slots: list[int] = []
        try:
            for _ in range(n):
                s = self.slots.assign()  # leak: the handler answers an empty list and keeps those assigned so far
                self.ssm[s].copy_(self.ssm[parent.slot])
                slots.append(s)
        except LookupError:
            return []
        self.parked.extend(slots)
        return slots

    def fork_group(self, rid: str, n: int) -> list[int]:
        parent = self.requests[rid]
        slots: list[int] = []
        try:
            for _ in range(n):
                s = self.slots.assign()  # clean: near miss, the handler unassigns what was taken
                slots.append(s)
                self.ssm[s].copy_(self.ssm[parent.slot])
        except LookupError:
            for s in slots:
                self.slots.unassign(s)
            return []
        self.parked.extend(slots)
        return slots

    def migrate(self, rid: str) -> int:
        """Moves the state to a new slot to defragment the pool."""
        req = self.requests[rid]
        new = self.slots.assign()  # clean: near miss, the old one is unassigned before the field changes
        self.ssm[new].copy_(self.ssm[req.slot])
        self.conv[new].copy_(self.conv[req.slot])
        self.slots.unassign(req.slot)
        req.slot = new
        return new

    def reset(self, rid: str) -> None:
        req = self.requests[rid]
        fresh = self.slots.assign()  # leak: fresh is unassigned nowhere when the request is already done
        self.ssm[fresh].zero_()
        if req.done:
            return
        self.slots.unassign(req.slot)
        req.slot = fresh

    def unpark(self) -> None:
        for s in self.parked:
            self.slots.unassign(s)
        self.parked = []

    def remove(self, rid: str) -> None:
        req = self.requests.pop(rid)
        self.slots.unassign(req.slot)
        req.slot = -1

    def remove_finished(self) -> int:
        finished = [r for r in self.requests.values() if r.done]
        for r in finished:
            self.remove(r.rid)
        return len(finished)

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        return {rid: self.ssm[r.slot].clone() for rid, r in self.requests.items()}
