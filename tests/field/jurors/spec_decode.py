"""Draft/verify worker: draft slots, tree mask buffers and KV reservations."""
from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Iterator, Optional, Protocol

import torch


class DraftModel(Protocol):
    def propose(self, slot: int, tokens: list[int], k: int) -> list[int]: ...


class TargetModel(Protocol):
    def verify(self, tokens: list[int], draft: list[int], mask: torch.Tensor) -> list[int]: ...


class DraftSlots:
    def __init__(self, count: int) -> None:
        self._free = list(range(count))

    def take(self) -> int:
        return self._free.pop() if self._free else -1

    def put(self, slot: int) -> None:
        self._free.append(slot)


class MaskPool:
    def __init__(self, count: int, width: int) -> None:
        self.width = width
        self._free = [torch.zeros(width, width, dtype=torch.bool) for _ in range(count)]
        self._dirty: list[torch.Tensor] = []

    def get(self) -> Optional[torch.Tensor]:
        if not self._free:
            self._free, self._dirty = self._dirty, []
            for mask in self._free:
                mask.zero_()
        return self._free.pop() if self._free else None

    def give(self, mask: torch.Tensor) -> None:
        self._dirty.append(mask)


class KvBudget:
    """Counts tokens promised to lookahead."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def reserve(self, n: int) -> bool:
        if n > self.left:
            return False
        self.left -= n
        return True

    def refund(self, n: int) -> None:
        self.left += n

    @contextmanager
    def reserved(self, n: int) -> Iterator[bool]:
        ok = self.reserve(n)  # clean: refunded in finally when it was granted
        try:
            yield ok
        finally:
            if ok:
                self.refund(n)


@dataclass(eq=False)
class SpecRequest:
    rid: str
    tokens: list[int]
    slot: int = -1
    mask: Optional[torch.Tensor] = None
    reserved: int = 0
    accepted: int = 0
    disabled: bool = False
    history: list[float] = field(default_factory=list)


class SpecWorker:
    def __init__(self, draft: DraftModel, target: TargetModel, slots: DraftSlots, masks: MaskPool,
                 budget: KvBudget, k: int = 5) -> None:
        self.draft = draft
        self.target = target
        self.slots = slots
        self.masks = masks
        self.budget = budget
        self.k = k
        self.active: dict[str, SpecRequest] = {}

    def start(self, req: SpecRequest) -> bool:
        slot = self.slots.take()  # leak: without a mask buffer start() returns False and keeps the slot
        if slot < 0:
            return False
        mask = self.masks.get()  # clean: kept in the request, and finish(), abort() and disable() give it back
        if mask is None:
            return False
        req.slot, req.mask = slot, mask
        self.active[req.rid] = req
        return True

    def start_pair(self, req: SpecRequest) -> bool:
        mask = self.masks.get()  # clean: near miss, given back when there is no slot
        if mask is None:
            return False
        slot = self.slots.take()  # clean: kept in the request, released by finish(), abort() or disable()
        if slot < 0:
            self.masks.give(mask)
            return False
        req.slot, req.mask = slot, mask
        self.active[req.rid] = req
        return True

    def _detach(self, req: SpecRequest) -> None:
        if req.slot >= 0:
            self.slots.put(req.slot)
            req.slot = -1
        if req.mask is not None:
            self.masks.give(req.mask)
            req.mask = None

    def step(self, req: SpecRequest) -> int:
        if req.disabled or req.mask is None:
            return 0
        if not self.budget.reserve(self.k):  # leak: an empty proposal returns before the rejected tokens are refunded
            return 0
        draft = self.draft.propose(req.slot, req.tokens, self.k)
        if not draft:
            return 0
        accepted = self.target.verify(req.tokens, draft, req.mask)
        req.reserved += len(accepted)
        self.budget.refund(self.k - len(accepted))
        req.tokens.extend(accepted)
        req.accepted += len(accepted)
        req.history.append(len(accepted) / self.k)
        if sum(req.history[-8:]) < 0.5:
            self.disable(req)
        return len(accepted)

    def step_greedy(self, req: SpecRequest) -> int:
        if req.mask is None:
            return 0
        with self.budget.reserved(self.k) as ok:  # clean: the context manager refunds what it granted
            if not ok:
                return 0
            draft = self.draft.propose(req.slot, req.tokens, self.k)
            accepted = self.target.verify(req.tokens, draft, req.mask)
        req.tokens.extend(accepted)
        return len(accepted)

    def verify_tree(self, req: SpecRequest, branches: list[list[int]]) -> list[int]:
        best: list[int] = []
        for branch in branches:
            mask = self.masks.get()  # leak: break after a fully accepted branch leaves this mask out of the pool
            if mask is None:
                break
            mask[: len(branch), : len(branch)] = torch.ones(len(branch), len(branch), dtype=torch.bool).tril()
            accepted = self.target.verify(req.tokens, branch, mask)
            if len(accepted) > len(best):
                best = accepted
            if len(best) == len(branch):
                break
            self.masks.give(mask)
        return best

    def verify_batch(self, reqs: list[SpecRequest], drafts: list[list[int]]) -> list[list[int]]:
        results: list[list[int]] = []
        for req, draft in zip(reqs, drafts):
            mask = self.masks.get()  # clean: near miss, given back before the break is looked at
            if mask is None:
                break
            accepted = self.target.verify(req.tokens, draft, mask)
            self.masks.give(mask)
            results.append(accepted)
            if not accepted:
                break
        return results

    def warmup(self, rounds: int) -> None:
        slot = self.slots.take()  # clean: near miss, the loss is the rebinding in the loop; without rounds this one is put back
        for _ in range(rounds):
            if slot >= 0:
                self.draft.propose(slot, [0], self.k)
            slot = self.slots.take()  # leak: overwrites a slot which is still held
        if slot >= 0:
            self.slots.put(slot)

    def disable(self, req: SpecRequest) -> None:
        req.disabled = True
        self._detach(req)

    def finish(self, rid: str) -> Optional[SpecRequest]:
        req = self.active.pop(rid, None)
        if req is None:
            return None
        self._detach(req)
        self.budget.refund(req.reserved)
        req.reserved = 0
        return req

    def abort(self, rid: str) -> None:
        self.finish(rid)
