"""Drives draft and verification for all live sequences."""

from __future__ import annotations

import logging
from collections import deque

from .drafter import DraftDiverged, Drafter, Proposal
from .pools import CapacityError, DraftSlots, PageLedger
from .verifier import Scorer, Verifier

logger = logging.getLogger(__name__)


class SpecEngine:
    def __init__(self, pages: int, slots: int, vocab: int, scorer: Scorer) -> None:
        self.ledger = PageLedger(pages)
        self.drafter = Drafter(DraftSlots(slots), self.ledger, vocab)
        self.verifier = Verifier(self.ledger, scorer)
        self._queue: deque[Proposal] = deque()

    def add(self, seq_id: str, prompt_pages: int) -> bool:
        """Register a sequence with both halves."""
        if not self.drafter.attach(seq_id):  # clean: detached in the handler, or left to remove
            return False
        try:
            self.verifier.start(seq_id, prompt_pages)  # clean: kept in the verifier's table until remove
        except CapacityError:
            self.drafter.detach(seq_id)
            return False
        return True

    def remove(self, seq_id: str) -> None:
        self.drafter.detach(seq_id)
        self.verifier.stop(seq_id)

    def step(self, seq_id: str, seed: int) -> int:
        proposal = self.drafter.propose_safe(seq_id, seed)  # clean: verify takes the pages over in both of its branches
        if proposal is None:
            return 0
        return self.verifier.verify(proposal)

    def step_optimistic(self, seq_id: str, seed: int) -> int:
        try:
            proposal = self.drafter.propose(seq_id, seed)  # leak: handed to verify_if_live, which returns without the pages when the sequence is gone
        except (CapacityError, DraftDiverged):
            return 0
        return self.verifier.verify_if_live(proposal) if proposal else 0

    def enqueue(self, seq_id: str, seed: int) -> bool:
        proposal = self.drafter.propose_safe(seq_id, seed)  # clean: waits in the queue, run_queue or cancel takes it out
        if proposal is None:
            return False
        self._queue.append(proposal)
        return True

    def run_queue(self, budget: int) -> int:
        done = 0
        while self._queue and budget > 0:
            proposal = self._queue.popleft()
            budget -= len(proposal.tokens)
            done += self.verifier.verify(proposal)
        return done

    def cancel(self, seq_id: str) -> None:
        keep: deque[Proposal] = deque()
        for proposal in self._queue:
            if proposal.seq_id == seq_id:
                self.ledger.settle(proposal.grant)
            else:
                keep.append(proposal)
        self._queue = keep
        self.remove(seq_id)

    def step_tree(self, seq_id: str, seeds: list[int]) -> int:
        """Verify the branches in turn and stop at the first good one."""
        best = 0
        for proposal in self.drafter.propose_tree(seq_id, seeds):  # leak: the break leaves the remaining proposals of the list with their pages
            best = max(best, self.verifier.verify(proposal))
            if best == len(proposal.tokens):
                break
        return best

    def step_first(self, seq_id: str, seeds: list[int]) -> int:
        """Verify the first branch only."""
        proposals = self.drafter.propose_tree(seq_id, seeds)  # clean: the first goes to verify, the rest is settled before
        for other in proposals[1:]:
            self.ledger.settle(other.grant)
        return self.verifier.verify(proposals[0]) if proposals else 0
