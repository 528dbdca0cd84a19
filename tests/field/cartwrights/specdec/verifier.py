"""Verification side: decides how many proposed tokens are kept."""

from __future__ import annotations

import logging
from typing import Callable

from .drafter import Proposal
from .pools import CapacityError, PageGrant, PageLedger

logger = logging.getLogger(__name__)

Scorer = Callable[[list[int]], int]


class Verifier:
    def __init__(self, ledger: PageLedger, scorer: Scorer) -> None:
        self.ledger = ledger
        self.scorer = scorer
        self._committed: dict[str, PageGrant] = {}

    def start(self, seq_id: str, prompt_pages: int) -> None:
        if seq_id in self._committed:
            raise ValueError(f"{seq_id} was started already")
        self._committed[seq_id] = self.ledger.grant(prompt_pages, seq_id)  # clean: a new key of the table, stop settles it

    def restart(self, seq_id: str, prompt_pages: int) -> None:
        old = self._committed.pop(seq_id, None)
        if old is not None:
            self.ledger.settle(old)
        self._committed[seq_id] = self.ledger.grant(prompt_pages, seq_id)  # clean: the former grant left the table and was settled

    def stop(self, seq_id: str) -> None:
        grant = self._committed.pop(seq_id, None)
        if grant is not None:
            self.ledger.settle(grant)

    def has(self, seq_id: str) -> bool:
        return seq_id in self._committed

    def verify(self, proposal: Proposal) -> int:
        """Takes over the proposal's pages, accepted or not."""
        accepted = self.scorer(proposal.tokens)
        home = self._committed.get(proposal.seq_id)
        if home is None:
            self.ledger.settle(proposal.grant)
            return 0
        self.ledger.trim(proposal.grant, accepted)
        self.ledger.absorb(home, proposal.grant)
        return accepted

    def verify_if_live(self, proposal: Proposal) -> int:
        home = self._committed.get(proposal.seq_id)
        if home is None:
            logger.debug("%s ended before verification", proposal.seq_id)
            return 0
        return self.verify(proposal)

    def rescore(self, seq_id: str, tokens: list[int]) -> int:
        """Score on temporary pages without changing the sequence."""
        scratch = self.ledger.grant(len(tokens), "rescore")  # clean: the finally settles it even when the second grant raises
        try:
            bonus = self.ledger.grant(1, "rescore")  # clean: its pages join scratch and are settled with it
            self.ledger.absorb(scratch, bonus)
            accepted = self.scorer(tokens)
        finally:
            self.ledger.settle(scratch)
        return accepted

    def widen(self, seq_id: str, count: int) -> bool:
        home = self._committed.get(seq_id)
        try:
            extra = self.ledger.grant(count, seq_id)  # leak: for a sequence that has stopped the function returns and extra is dropped
        except CapacityError:
            return False
        if home is None:
            return False
        self.ledger.absorb(home, extra)
        return True
