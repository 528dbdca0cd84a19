"""Verification of drafts and the bookkeeping of open tickets."""
from __future__ import annotations

import torch

from .proposer import NgramProposer
from .slots import DraftDesk, Ticket


class SpecWorker:
    def __init__(self, desk: DraftDesk, proposer: NgramProposer):
        self.desk = desk
        self.proposer = proposer
        self.drafts: dict[str, Ticket] = {}
        self.bonus: dict[str, Ticket] = {}
        self.enabled = True

    def draft(self, rid: str, history: torch.Tensor) -> bool:
        old = self.drafts.pop(rid, None)
        if old is not None:
            old.cancel()
        ticket = self.proposer.propose(history)  # clean: near miss, the earlier ticket of the request was cancelled first
        if ticket is None:
            return False
        self.drafts[rid] = ticket
        return True

    def draft_batch(self, batch: dict[str, torch.Tensor]) -> int:
        n = 0
        for rid, history in batch.items():
            ticket = self.proposer.propose(history)  # leak: requests that already have a draft are skipped after the reservation
            if ticket is None:
                continue
            if rid in self.drafts:
                continue
            self.drafts[rid] = ticket
            n += 1
        return n

    def draft_bonus(self, rid: str, history: torch.Tensor) -> bool:
        if rid in self.bonus:
            return True
        ticket = self.proposer.propose(history)  # leak: kept in `bonus`, which drop() deletes from without cancelling
        if ticket is None:
            return False
        self.bonus[rid] = ticket
        return True

    def verify(self, rid: str, target: torch.Tensor) -> int:
        ticket = self.drafts.pop(rid, None)
        if ticket is None:
            return 0
        draft = ticket.redeem()
        n = min(draft.numel(), target.numel())
        return int((draft[:n] == target[:n]).long().cumprod(0).sum())

    def verify_fresh(self, history: torch.Tensor, target: torch.Tensor) -> int:
        ticket = self.proposer.propose(history)  # clean: near miss, the disabled branch cancels and the other redeems
        if ticket is None:
            return 0
        if not self.enabled:
            ticket.cancel()
            return 0
        draft = ticket.redeem()
        n = min(draft.numel(), target.numel())
        return int((draft[:n] == target[:n]).sum())

    def rescore(self, history: torch.Tensor, target: torch.Tensor) -> list[float]:
        a = self.desk.reserve(target.numel())  # leak: kept when the second reservation fails
        if a is None:
            return []
        b = self.desk.reserve(target.numel())  # clean: cancelled at the end
        if b is None:
            return []
        scores = [float(x) for x in history[: target.numel()]]
        b.cancel()
        a.cancel()
        return scores

    def reserve_probe(self, width: int) -> bool:
        ticket = self.desk.reserve(width)  # clean: cancelled unless None
        if ticket is not None:
            ticket.cancel()
        return ticket is not None

    def drop(self, rid: str) -> None:
        ticket = self.drafts.pop(rid, None)
        if ticket is not None:
            ticket.cancel()
        self.bonus.pop(rid, None)
