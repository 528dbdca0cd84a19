"""Speculative decoding: draft tokens hold KV slots until they are verified."""
from __future__ import annotations

import logging
from typing import Protocol

import torch

logger = logging.getLogger(__name__)


class Proposer(Protocol):
    def propose(self, last: int, k: int) -> list[int]: ...


class Target(Protocol):
    def score(self, tokens: list[int], slots: list[int]) -> list[bool]: ...


class SlotMap:
    """Bitmap allocator of KV slots."""

    def __init__(self, n: int) -> None:
        self.free_mask = torch.ones(n, dtype=torch.bool)

    def allocate_slots(self, n: int) -> list[int] | None:
        idx = self.free_mask.nonzero().flatten()
        if idx.numel() < n:
            return None
        chosen = idx[:n]
        self.free_mask[chosen] = False
        return chosen.tolist()

    def free_slots(self, slots: list[int]) -> None:
        self.free_mask[torch.tensor(slots, dtype=torch.long)] = True


class SpecDecoder:
    def __init__(self, slots: SlotMap, proposer: Proposer, target: Target, k: int = 4) -> None:
        self.slots = slots
        self.proposer = proposer
        self.target = target
        self.k = k
        self.committed: dict[str, list[int]] = {}

    def _commit(self, req: str, slots: list[int]) -> None:
        self.committed.setdefault(req, []).extend(slots)

    def step(self, req: str, last: int) -> list[int]:
        drafts = self.proposer.propose(last, self.k)
        slots = self.slots.allocate_slots(len(drafts))  # clean: accepted part committed, rejected part freed
        if slots is None:
            return []
        ok = self.target.score(drafts, slots)
        n = ok.index(False) if False in ok else len(ok)
        self._commit(req, slots[:n])
        self.slots.free_slots(slots[n:])
        return drafts[:n]

    def step_greedy(self, req: str, last: int) -> list[int]:
        drafts = self.proposer.propose(last, self.k)
        slots = self.slots.allocate_slots(len(drafts))  # leak: the rejected tail is neither committed nor freed
        if slots is None:
            return []
        ok = self.target.score(drafts, slots)
        n = ok.index(False) if False in ok else len(ok)
        self._commit(req, slots[:n])
        return drafts[:n]

    def step_typical(self, req: str, last: int, threshold: int) -> list[int]:
        drafts = self.proposer.propose(last, self.k)
        slots = self.slots.allocate_slots(len(drafts))  # leak: too few accepted tokens return before anything is freed
        if slots is None:
            logger.debug("out of slots for %s", req)
            return []
        ok = self.target.score(drafts, slots)
        n = sum(ok)
        if n < threshold:
            return []
        self._commit(req, slots[:n])
        self.slots.free_slots(slots[n:])
        return drafts[:n]

    def step_all_or_nothing(self, req: str, last: int) -> list[int]:
        drafts = self.proposer.propose(last, self.k)
        slots = self.slots.allocate_slots(self.k)  # clean: near miss, one branch commits and the other frees
        if slots is None:
            return []
        if all(self.target.score(drafts, slots)):
            self._commit(req, slots)
            return drafts
        self.slots.free_slots(slots)
        return []

    def tree_step(self, req: str, roots: list[int]) -> list[int]:
        best: list[int] = []
        best_slots: list[int] = []
        for root in roots:
            drafts = self.proposer.propose(root, self.k)
            slots = self.slots.allocate_slots(len(drafts))  # leak: a better branch replaces the best slots without freeing them
            if slots is None:
                break
            n = sum(self.target.score(drafts, slots))
            if n > len(best):
                best, best_slots = drafts[:n], slots
            else:
                self.slots.free_slots(slots)
        self._commit(req, best_slots)
        return best

    def tree_step_ranked(self, req: str, roots: list[int]) -> list[int]:
        best: list[int] = []
        best_slots: list[int] = []
        for root in roots:
            drafts = self.proposer.propose(root, self.k)
            slots = self.slots.allocate_slots(len(drafts))  # clean: near miss, the displaced best is freed first
            if slots is None:
                break
            n = sum(self.target.score(drafts, slots))
            if n > len(best):
                if best_slots:
                    self.slots.free_slots(best_slots)
                best, best_slots = drafts[:n], slots
            else:
                self.slots.free_slots(slots)
        self._commit(req, best_slots)
        return best

    def calibrate(self, last: int) -> float:
        drafts = self.proposer.propose(last, self.k)
        slots = self.slots.allocate_slots(self.k)  # clean: freed before the rate is returned
        if slots is None:
            return 0.0
        rate = sum(self.target.score(drafts, slots)) / self.k
        self.slots.free_slots(slots)
        return rate

    def calibrate_many(self, lasts: list[int]) -> list[float]:
        rates = []
        for last in lasts:
            slots = self.slots.allocate_slots(self.k)  # leak: only the first slot of each round is freed
            if slots is None:
                break
            rates.append(sum(self.target.score(self.proposer.propose(last, self.k), slots)) / self.k)
            self.slots.free_slots(slots[:1])
        return rates

    def finish(self, req: str) -> None:
        slots = self.committed.pop(req, [])
        if slots:
            self.slots.free_slots(slots)

    def has_room(self, n: int) -> bool:
        return self.slots.allocate_slots(n) is not None  # leak: compared with None and lost
