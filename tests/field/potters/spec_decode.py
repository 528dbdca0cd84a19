"""Speculative decoding: draft slots, verification and acceptance."""
from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Callable, Dict, Generator, List, Optional, Tuple


@dataclass
class DraftSlot:
    index: int
    tokens: List[int] = field(default_factory=list)
    seq_id: int = -1


class DraftSlots:
    """Scratch rows of the draft model's KV cache."""

    def __init__(self, n: int) -> None:
        self._open = [DraftSlot(i) for i in range(n)]

    def occupy(self, seq_id: int) -> Optional[DraftSlot]:
        if not self._open:
            return None
        slot = self._open.pop()
        slot.seq_id = seq_id
        slot.tokens = []
        return slot

    def vacate(self, slot: DraftSlot) -> None:
        slot.seq_id = -1
        self._open.append(slot)

    def __len__(self) -> int:
        return len(self._open)


@dataclass
class Proposal:
    slot: DraftSlot
    owns_slot: bool = True

    def discard(self, slots: DraftSlots) -> None:
        if self.owns_slot:
            slots.vacate(self.slot)
            self.owns_slot = False


Propose = Callable[[List[int], int], List[int]]


class SpecWorker:
    def __init__(self, slots: DraftSlots, propose: Propose, k: int = 4) -> None:
        self.slots = slots
        self.propose = propose
        self.k = k
        self.sticky: Dict[int, DraftSlot] = {}
        self.rng = random.Random(0)

    def draft(self, seq_id: int, context: List[int]) -> Optional[Proposal]:
        slot = self.slots.occupy(seq_id)  # clean: None, vacated for an empty draft, or in the proposal
        if slot is None:
            return None
        slot.tokens = self.propose(context, self.k)
        if not slot.tokens:
            self.slots.vacate(slot)
            return None
        return Proposal(slot)

    def draft_sticky(self, seq_id: int, context: List[int]) -> Optional[Proposal]:
        """Reuses the row of the previous step; drop_sticky vacates it."""
        slot = self.sticky.get(seq_id)
        if slot is None:
            slot = self.slots.occupy(seq_id)  # clean: near miss, lives in sticky and the proposal does not own it
            if slot is None:
                return None
            self.sticky[seq_id] = slot
        slot.tokens = self.propose(context, self.k)
        return Proposal(slot, owns_slot=False)

    def drop_sticky(self, seq_id: int) -> None:
        slot = self.sticky.pop(seq_id, None)
        if slot is not None:
            self.slots.vacate(slot)

    def cold_token(self, seq_id: int, context: List[int]) -> int:
        """One token for a sequence that is not in the batch."""
        slot = self.slots.occupy(seq_id)  # leak: the proposal is marked as not owning, so discard skips it
        if slot is None:
            return -1
        slot.tokens = self.propose(context, 1)
        proposal = Proposal(slot, owns_slot=False)
        token = slot.tokens[0] if slot.tokens else -1
        proposal.discard(self.slots)
        return token

    def step(self, seq_id: int, context: List[int], verify: Callable[[List[int]], int]) -> List[int]:
        proposal = self.draft(seq_id, context)  # leak: a full rejection returns without discard
        if proposal is None:
            return []
        accepted = verify(proposal.slot.tokens)
        if accepted == 0:
            return []
        out = proposal.slot.tokens[:accepted]
        proposal.discard(self.slots)
        return out

    def step_mixed(self, seq_id: int, context: List[int], sticky: bool) -> int:
        if sticky:
            proposal = self.draft_sticky(seq_id, context)  # clean: the row stays in sticky
        else:
            proposal = self.draft(seq_id, context)  # clean: near miss, discard vacates what the proposal owns
        if proposal is None:
            return 0
        n = len(proposal.slot.tokens)
        proposal.discard(self.slots)
        return n

    def best_of(self, seq_id: int, context: List[int], tries: int) -> List[int]:
        best: Optional[Proposal] = None
        for _ in range(tries):
            cand = self.draft(seq_id, context)  # leak: a better candidate is bound over the former best
            if cand is None:
                break
            if best is None or len(cand.slot.tokens) > len(best.slot.tokens):
                best = cand
            else:
                cand.discard(self.slots)
        if best is None:
            return []
        tokens = list(best.slot.tokens)
        best.discard(self.slots)
        return tokens

    def longest_of(self, seq_id: int, context: List[int], tries: int) -> List[int]:
        best: Optional[Proposal] = None
        for _ in range(tries):
            cand = self.draft(seq_id, context)  # clean: near miss, the loser of each round is discarded
            if cand is None:
                continue
            if best is None:
                best = cand
                continue
            loser = cand
            if len(cand.slot.tokens) > len(best.slot.tokens):
                best, loser = cand, best
            loser.discard(self.slots)
        if best is None:
            return []
        try:
            return list(best.slot.tokens)
        finally:
            best.discard(self.slots)

    def tree(self, roots: List[Tuple[int, List[int]]]) -> Generator[List[int], int, None]:
        """Sends drafts out and takes the accepted length back; a negative length skips the branch."""
        for seq_id, context in roots:
            slot = self.slots.occupy(seq_id)  # leak: a skipped branch keeps its row
            if slot is None:
                return
            slot.tokens = self.propose(context, self.k)
            accepted = yield slot.tokens
            if accepted is None or accepted < 0:
                continue
            del slot.tokens[accepted:]
            self.slots.vacate(slot)


def accept_greedy(draft: List[int], target: List[int]) -> int:
    n = 0
    for a, b in zip(draft, target):
        if a != b:
            break
        n += 1
    return n


def bench(worker: SpecWorker, contexts: List[List[int]], target: List[int]) -> float:
    """Mean accepted length over contexts."""
    total = 0
    for i, context in enumerate(contexts):
        proposal = worker.draft(i, context)  # clean: discarded each round
        if proposal is None:
            continue
        total += accept_greedy(proposal.slot.tokens, target)
        proposal.discard(worker.slots)
    return total / max(1, len(contexts))
