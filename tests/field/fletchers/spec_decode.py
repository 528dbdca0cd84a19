"""Draft/verify speculative decoding on slot and scratch pools."""
from __future__ import annotations

import logging
import random
from dataclasses import dataclass, field
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

logger = logging.getLogger(__name__)


class DraftSlots:
    """Slots in the draft model's KV cache."""

    def __init__(self, n: int) -> None:
        self._free = list(range(n))

    def reserve(self) -> int:
        """Returns -1 when every slot is taken."""
        return self._free.pop() if self._free else -1

    def unreserve(self, slot: int) -> None:
        self._free.append(slot)


@dataclass
class Scratch:
    idx: int
    logits: List[float]
    _pool: "ScratchPool" = field(repr=False, default=None)

    def give_back(self) -> None:
        self._pool.give_back(self)


class ScratchPool:

    def __init__(self, n: int, width: int) -> None:
        self.width = width
        self._idle = [Scratch(i, [0.0] * width, self) for i in range(n)]

    def borrow(self) -> Optional[Scratch]:
        if not self._idle:
            return None
        return self._idle.pop()

    def give_back(self, scratch: Scratch) -> None:
        self._idle.append(scratch)


class Proposal(NamedTuple):
    slot: int
    tokens: List[int]
    scratch: Optional[Scratch]


class DraftRunner:

    def __init__(self, slots: DraftSlots, scratch: ScratchPool, k: int = 4) -> None:
        self.slots = slots
        self.scratch = scratch
        self.k = k

    def propose(self, prefix: Sequence[int]) -> Optional[Proposal]:
        slot = self.slots.reserve()  # leak: no scratch, no rollback of the slot
        if slot < 0:
            return None
        scratch = self.scratch.borrow()  # clean: goes out in the proposal
        if scratch is None:
            logger.debug("scratch pool is dry")
            return None
        return Proposal(slot, self._draft(prefix, scratch), scratch)

    def propose_greedy(self, prefix: Sequence[int]) -> Optional[Proposal]:
        slot = self.slots.reserve()  # clean: near miss, unreserved if the scratch is missing
        if slot == -1:
            return None
        scratch = self.scratch.borrow()  # clean: goes out in the proposal
        if not scratch:
            self.slots.unreserve(slot)
            return None
        return Proposal(slot=slot, tokens=self._draft(prefix, scratch), scratch=scratch)

    def propose_ngram(self, prefix: Sequence[int]) -> Optional[Proposal]:
        """Prompt lookup: no scratch is involved."""
        slot = self.slots.reserve()  # leak: no n-gram match returns None past the reservation
        if slot < 0:
            return None
        tail = list(prefix[-2:])
        for i in range(len(prefix) - 3, 1, -1):
            if list(prefix[i - 2:i]) == tail:
                return Proposal(slot, list(prefix[i:i + self.k]), None)
        return None

    def release(self, p: Proposal) -> None:
        self.slots.unreserve(p.slot)
        if p.scratch is not None:
            p.scratch.give_back()

    def _draft(self, prefix: Sequence[int], scratch: Scratch) -> List[int]:
        rng = random.Random(len(prefix))
        for i in range(self.scratch.width):
            scratch.logits[i] = rng.random()
        return [rng.randrange(100) for _ in range(self.k)]


class SpecWorker:

    def __init__(self, runner: DraftRunner, min_accept: float = 0.3) -> None:
        self.runner = runner
        self.min_accept = min_accept
        self.open_proposals: Dict[str, Proposal] = {}
        self.tree: List[Proposal] = []

    def step(self, prefix: List[int]) -> List[int]:
        p = self.runner.propose(prefix)  # clean: released after verification
        if p is None:
            return [self._sample(prefix)]
        accepted = self._verify(prefix, p.tokens)
        self.runner.release(p)
        return accepted

    def step_adaptive(self, prefix: List[int]) -> List[int]:
        p = self.runner.propose_greedy(prefix)  # leak: rate below min_accept returns without release
        if p is None:
            return [self._sample(prefix)]
        accepted = self._verify(prefix, p.tokens)
        if len(accepted) / len(p.tokens) < self.min_accept:
            return accepted + [self._sample(prefix)]
        self.runner.release(p)
        return accepted

    def step_lookup(self, prefix: List[int]) -> List[int]:
        p = self.runner.propose_ngram(prefix)  # clean: released below
        if p is None:
            p = self.runner.propose(prefix)  # clean: near miss, rebound only when the first gave None
        if p is not None:
            accepted = self._verify(prefix, p.tokens)
            self.runner.release(p)
            return accepted
        return [self._sample(prefix)]

    # -- overlapped ----------------------------------------------------

    def begin(self, req_id: str, prefix: List[int]) -> bool:
        if req_id in self.open_proposals:
            return True
        p = self.runner.propose_greedy(prefix)  # clean: stored under the request, end() and cancel() release it
        if p is None:
            return False
        self.open_proposals[req_id] = p
        return True

    def end(self, req_id: str, prefix: List[int]) -> List[int]:
        p = self.open_proposals.pop(req_id)
        try:
            return self._verify(prefix, p.tokens)
        finally:
            self.runner.release(p)

    def cancel(self, req_id: str) -> None:
        p = self.open_proposals.pop(req_id, None)
        if p is not None:
            self.runner.release(p)

    # -- tree ----------------------------------------------------------

    def expand(self, prefixes: List[List[int]]) -> int:
        self.tree = []
        for prefix in prefixes:
            p = self.runner.propose_greedy(prefix)  # leak: prune() keeps the best and forgets the others
            if p is None:
                break
            self.tree.append(p)
        return len(self.tree)

    def prune(self, prefix: List[int]) -> Optional[List[int]]:
        if not self.tree:
            return None
        best = max(self.tree, key=lambda p: sum(p.tokens))
        self.tree = []
        accepted = self._verify(prefix, best.tokens)
        self.runner.release(best)
        return accepted

    def best_of(self, prefixes: List[List[int]]) -> Optional[List[int]]:
        best: Optional[Proposal] = None
        for prefix in prefixes:
            p = self.runner.propose_greedy(prefix)  # clean: near miss, the loser of each comparison is released
            if p is None:
                break
            if best is None or sum(p.tokens) > sum(best.tokens):
                best, p = p, best
            if p is not None:
                self.runner.release(p)
        if best is None:
            return None
        tokens = best.tokens
        self.runner.release(best)
        return tokens

    def last_logits(self, prefix: List[int]) -> Optional[Tuple[float, ...]]:
        scratch = self.runner.scratch.borrow()  # leak: logits are copied, the scratch is dropped
        if scratch is None:
            return None
        self.runner._draft(prefix, scratch)
        return tuple(scratch.logits)

    def entropy_proxy(self, prefix: List[int]) -> float:
        scratch = self.runner.scratch.borrow()  # clean: near miss, given back through the object itself
        if scratch is None:
            return 0.0
        self.runner._draft(prefix, scratch)
        spread = max(scratch.logits) - min(scratch.logits)
        scratch.give_back()
        return spread

    def _verify(self, prefix: Sequence[int], tokens: Sequence[int]) -> List[int]:
        n = (len(prefix) * 7 + sum(tokens)) % (len(tokens) + 1)
        return list(tokens[:n])

    def _sample(self, prefix: Sequence[int]) -> int:
        return len(prefix) % 100
