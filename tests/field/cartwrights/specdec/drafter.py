"""Proposal side: keeps a slot of the draft model per speculating sequence."""

from __future__ import annotations

import logging

from .pools import CapacityError, DraftSlots, PageGrant, PageLedger

logger = logging.getLogger(__name__)


class DraftDiverged(Exception):
    """The draft model produced a token outside of the target vocabulary."""


class Proposal:
    def __init__(self, seq_id: str, tokens: list[int], grant: PageGrant) -> None:
        self.seq_id = seq_id
        self.tokens = tokens
        self.grant = grant


class Drafter:
    def __init__(self, slots: DraftSlots, ledger: PageLedger, vocab: int, width: int = 4) -> None:
        self.slots = slots
        self.ledger = ledger
        self.vocab = vocab
        self.width = width
        self._seats: dict[str, int] = {}

    # seats

    def attach(self, seq_id: str) -> bool:
        if seq_id in self._seats:
            return True
        slot = self.slots.seat()  # clean: None, or remembered in the seat table until detach
        if slot is None:
            return False
        self._seats[seq_id] = slot
        return True

    def detach(self, seq_id: str) -> None:
        slot = self._seats.pop(seq_id, None)
        if slot is not None:
            self.slots.unseat(slot)

    def move(self, old_id: str, new_id: str) -> None:
        """A sequence got a new id after a beam reshuffle."""
        if new_id in self._seats:
            self.detach(new_id)
        slot = self._seats.pop(old_id, None)
        if slot is not None:
            self._seats[new_id] = slot
            return
        slot = self.slots.seat()  # leak: a seat numbered 0 is falsy in the test below and is not put in the table
        if slot:
            self._seats[new_id] = slot

    # proposals

    def _generate(self, seed: int, count: int) -> list[int]:
        out = []
        for i in range(count):
            token = (seed * 31 + i * 17) % (self.vocab + 1)
            if token == self.vocab:
                raise DraftDiverged(f"token {token}")
            out.append(token)
        return out

    def propose(self, seq_id: str, seed: int) -> Proposal | None:
        """Tokens plus the target pages in which they will be verified."""
        if seq_id not in self._seats:
            return None
        grant = self.ledger.grant(self.width, seq_id)  # leak: a diverging draft raises out of _generate, before the proposal exists
        return Proposal(seq_id, self._generate(seed, self.width), grant)

    def propose_safe(self, seq_id: str, seed: int) -> Proposal | None:
        if seq_id not in self._seats:
            return None
        try:
            grant = self.ledger.grant(self.width, seq_id)  # clean: settled by the second handler, in the proposal otherwise
        except CapacityError:
            return None
        try:
            tokens = self._generate(seed, self.width)
        except DraftDiverged as exc:
            logger.debug("%s: %s", seq_id, exc)
            self.ledger.settle(grant)
            return None
        return Proposal(seq_id, tokens, grant)

    def propose_tree(self, seq_id: str, seeds: list[int]) -> list[Proposal]:
        """One proposal per branch; branches that diverge are left out."""
        out: list[Proposal] = []
        for seed in seeds:
            grant = self.ledger.grant_upto(self.width, seq_id)  # clean: None ends the loop, a diverged branch settles, the others are returned
            if grant is None:
                break
            try:
                out.append(Proposal(seq_id, self._generate(seed, len(grant)), grant))
            except DraftDiverged:
                self.ledger.settle(grant)
        return out
