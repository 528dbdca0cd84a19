"""Draft state for speculative decoding."""
from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import Callable, Optional

import torch

logger = logging.getLogger(__name__)


class DraftState:
    def __init__(self, index: int, width: int) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.probs = torch.zeros(width)

    def clear(self) -> None:
        self.tokens.clear()
        self.probs.zero_()


class DraftStatePool:
    """Bounded stack of draft states, with a count of those given out."""

    def __init__(self, size: int, width: int) -> None:
        self._stack = [DraftState(i, width) for i in range(size)]
        self._taken = 0

    def take(self) -> Optional[DraftState]:
        if not self._stack:
            return None
        state = self._stack.pop()  # clean: counted and returned
        self._taken += 1
        return state

    def take_many(self, n: int) -> list[DraftState]:
        """Exactly ``n`` states, or an empty list."""
        got: list[DraftState] = []
        while len(got) < n:
            state = self.take()  # leak: a shortage returns an empty list and forgets those already taken
            if state is None:
                return []
            got.append(state)
        return got

    def give_back(self, state: DraftState) -> None:
        state.clear()
        self._taken -= 1
        self._stack.append(state)


@dataclass
class Sequence:
    seq_id: int
    tokens: list[int]
    draft: Optional[DraftState] = None
    disabled: bool = False


class Proposer:
    def __init__(self, pool: DraftStatePool, draft_fn: Callable[[list[int]], int], k: int) -> None:
        self.pool = pool
        self.draft_fn = draft_fn
        self.k = k

    def _fill(self, state: DraftState, context: list[int]) -> None:
        ctx = list(context)
        for _ in range(self.k):
            tok = self.draft_fn(ctx)
            state.tokens.append(tok)
            ctx.append(tok)

    def propose(self, seqs: list[Sequence]) -> list[Sequence]:
        """Attach a draft to every sequence that can have one."""
        proposed: list[Sequence] = []
        for seq in seqs:
            if seq.disabled or seq.draft is not None:
                continue
            state = self.pool.take()  # clean: near miss, moved into the sequence, Verifier detaches it
            if state is None:
                break
            self._fill(state, seq.tokens)
            seq.draft = state
            proposed.append(seq)
        return proposed

    def redraft(self, seq: Sequence) -> bool:
        """Draft anew after the tokens of the sequence were edited."""
        if seq.disabled:
            return False
        seq.draft = self.pool.take()  # leak: the draft that was attached before is overwritten
        if seq.draft is not None:
            self._fill(seq.draft, seq.tokens)
        return seq.draft is not None

    def propose_tree(self, seq: Sequence, width: int) -> list[list[int]]:
        states = self.pool.take_many(width)  # clean: each state goes back after its tokens were copied
        branches: list[list[int]] = []
        for state in states:
            self._fill(state, seq.tokens + [len(branches)])
            branches.append(list(state.tokens))
            self.pool.give_back(state)
        return branches

    def propose_best_of(self, seq: Sequence, n: int) -> list[int]:
        """Draft ``n`` times, keep the longest run of distinct tokens."""
        best: Optional[DraftState] = None
        for _ in range(n):
            cand = self.pool.take()  # leak: a better candidate displaces the earlier best, which is not given back
            if cand is None:
                break
            self._fill(cand, seq.tokens)
            if best is None or len(set(cand.tokens)) > len(set(best.tokens)):
                best = cand
            else:
                self.pool.give_back(cand)
        if best is None:
            return []
        out = list(best.tokens)
        self.pool.give_back(best)
        return out

    def propose_longest(self, seq: Sequence, n: int) -> list[int]:
        best: Optional[DraftState] = None
        for _ in range(n):
            cand = self.pool.take()  # clean: near miss, the two are exchanged and the loser always goes back
            if cand is None:
                break
            self._fill(cand, seq.tokens)
            if best is not None and len(cand.tokens) > len(best.tokens):
                best, cand = cand, best
            if best is None:
                best = cand
            else:
                self.pool.give_back(cand)
        if best is None:
            return []
        out = list(best.tokens)
        self.pool.give_back(best)
        return out


class Verifier:
    def __init__(self, pool: DraftStatePool, accept: Callable[[list[int], list[int]], int]) -> None:
        self.pool = pool
        self.accept = accept
        self._carry: dict[int, DraftState] = {}
        self.stats: defaultdict[str, int] = defaultdict(int)

    def verify(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            state, seq.draft = seq.draft, None
            if state is None:
                continue
            n = self.accept(seq.tokens, state.tokens)
            seq.tokens.extend(state.tokens[:n])
            self.stats["accepted"] += n
            self.pool.give_back(state)

    def carry_over(self, seq: Sequence) -> bool:
        """Start an empty draft for the next step."""
        state = self.pool.take()  # leak: the carry table is popped for its tokens only and the state dropped
        if state is None:
            return False
        stale = self._carry.pop(seq.seq_id, None)
        if stale is not None:
            self.pool.give_back(stale)
        self._carry[seq.seq_id] = state
        return True

    def resume(self, seq: Sequence) -> list[int]:
        state = self._carry.pop(seq.seq_id, None)
        if state is None:
            return []
        return list(state.tokens)
