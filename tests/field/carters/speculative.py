"""Speculative decoding: the draft model runs in a small table of scratch rows."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Optional, Sequence

Proposer = Callable[[Sequence[int], int], list[int]]
Scorer = Callable[[Sequence[int], Sequence[int]], int]


class DraftRows:
    """Rows of the draft model's KV; a row out of ``claim`` goes back with ``yield_row``."""

    def __init__(self, n: int) -> None:
        self._free = list(range(n))
        self.peak = 0
        self._n = n

    def claim(self) -> int:
        """-1 when every row is taken."""
        if not self._free:
            return -1
        row = self._free.pop()
        self.peak = max(self.peak, self._n - len(self._free))
        return row

    def yield_row(self, row: int) -> None:
        if row in self._free:
            raise ValueError(f"row {row} is free already")
        self._free.append(row)

    def __len__(self) -> int:
        return len(self._free)


@dataclass
class SpecState:
    tokens: list[int]
    row: int = -1
    draft: list[int] = field(default_factory=list)
    use_tree: bool = False
    accepted: int = 0


class Verifier:
    def __init__(self, rows: DraftRows, propose: Proposer, score: Scorer) -> None:
        self.rows = rows
        self.propose = propose
        self.score = score
        self.fallbacks = 0

    def step(self, state: SpecState, k: int) -> int:
        row = self.rows.claim()  # clean: near miss, both arms of the length check give it back
        if row < 0:
            self.fallbacks += 1
            return 0
        draft = self.propose(state.tokens, k)
        if len(draft) < k:
            self.rows.yield_row(row)
            return 0
        accepted = self.score(state.tokens, draft)
        state.tokens.extend(draft[:accepted])
        self.rows.yield_row(row)
        return accepted

    def step_adaptive(self, state: SpecState, k: int) -> int:
        speculate = k > 1 and len(state.tokens) > 2
        row = self.rows.claim() if speculate else -1  # clean: near miss, the same flag and the sign guard the release
        if speculate and row < 0:
            return 0
        n = k if speculate else 1
        accepted = self.score(state.tokens, self.propose(state.tokens, n))
        state.accepted += accepted
        if speculate:
            self.rows.yield_row(row)
        return accepted

    def step_budgeted(self, state: SpecState, k: int, budget: int) -> int:
        speculate = k > 1
        row = -1
        if speculate:
            row = self.rows.claim()  # leak: an exhausted budget turns the flag off before the release looks at it
            if row < 0:
                return 0
        draft = self.propose(state.tokens, k)
        if len(draft) > budget:
            draft = draft[:budget]
            speculate = False
        accepted = self.score(state.tokens, draft)
        state.accepted += accepted
        if speculate:
            self.rows.yield_row(row)
        return accepted

    def step_truthy(self, state: SpecState, k: int) -> int:
        row = self.rows.claim()  # leak: row 0 is a row but the truth test does not give it back
        if row == -1:
            return 0
        accepted = self.score(state.tokens, self.propose(state.tokens, k))
        if row:
            self.rows.yield_row(row)
        return accepted

    # a tree is begun in one call and settled in another

    def begin_tree(self, state: SpecState, k: int) -> bool:
        state.use_tree = k > 2
        if state.use_tree:
            state.row = self.rows.claim()  # clean: near miss, the field and the flag of the state carry it to settle_tree
            if state.row < 0:
                state.use_tree = False
        state.draft = self.propose(state.tokens, k)
        return state.use_tree

    def settle_tree(self, state: SpecState) -> int:
        accepted = self.score(state.tokens, state.draft)
        state.tokens.extend(state.draft[:accepted])
        state.draft = []
        if state.use_tree:
            self.rows.yield_row(state.row)
            state.row, state.use_tree = -1, False
        return accepted

    def decode(self, states: Sequence[SpecState], k: int) -> int:
        total = 0
        for state in states:
            self.begin_tree(state, k)
            total += self.settle_tree(state)
        return total


class MedusaRunner:
    """One row per head for the length of a call."""

    def __init__(self, rows: DraftRows, heads: int) -> None:
        self.rows = rows
        self.heads = heads

    def _claim_heads(self) -> list[int]:
        got: list[int] = []
        for _ in range(self.heads):
            row = self.rows.claim()  # clean: near miss, a short table gives back what was claimed
            if row < 0:
                for r in got:
                    self.rows.yield_row(r)
                return []
            got.append(row)
        return got

    def run(self, tokens: Sequence[int], propose: Proposer) -> list[list[int]]:
        rows = self._claim_heads()  # clean: all given back after the loop
        if not rows:
            return []
        out = [propose(tokens, i + 1) for i in range(len(rows))]
        for row in rows:
            self.rows.yield_row(row)
        return out

    def run_until(self, tokens: Sequence[int], propose: Proposer, stop: int) -> list[list[int]]:
        out: list[list[int]] = []
        rows = self._claim_heads()  # leak: the stop token breaks and the heads behind it keep their rows
        for i, row in enumerate(rows):
            draft = propose(tokens, i + 1)
            out.append(draft)
            self.rows.yield_row(row)
            if stop in draft:
                break
        return out

    def run_pairs(self, tokens: Sequence[int], propose: Proposer) -> int:
        rows = self._claim_heads()  # leak: an odd head at the end is in no pair and stays claimed
        total = 0
        for a, b in zip(rows[::2], rows[1::2]):
            total += len(propose(tokens, 2))
            self.rows.yield_row(a)
            self.rows.yield_row(b)
        return total


class Lookahead:
    """Keeps a row as long as the n-gram pool keeps hitting."""

    def __init__(self, rows: DraftRows) -> None:
        self.rows = rows
        self.row: Optional[int] = None
        self.hits = 0

    def on_hit(self) -> bool:
        if self.row is None:
            row = self.rows.claim()  # clean: near miss, only a valid row gets into the field, on_miss gives it back
            if row < 0:
                return False
            self.row = row
        self.hits += 1
        return True

    def on_miss(self) -> None:
        self.hits = 0
        if self.row is not None:
            self.rows.yield_row(self.row)
            self.row = None


def warm_draft(rows: DraftRows, prompts: Sequence[Sequence[int]], propose: Proposer) -> int:
    """Replay prompts through the draft model, skipping the ones that it cannot extend."""
    warmed = 0
    row = rows.claim()  # clean: near miss, one row serves the whole loop and its continue
    if row < 0:
        return 0
    for prompt in prompts:
        if not propose(prompt, 1):
            continue
        warmed += 1
    rows.yield_row(row)
    return warmed


def race(rows: DraftRows, tokens: Sequence[int], a: Proposer, b: Proposer) -> list[int]:
    row_a = rows.claim()  # leak: without a second row the single-draft way returns and keeps this one
    if row_a < 0:
        return []
    row_b = rows.claim()  # clean: given back with the first
    if row_b < 0:
        return a(tokens, 1)
    best = max(a(tokens, 4), b(tokens, 4), key=len)
    rows.yield_row(row_b)
    rows.yield_row(row_a)
    return best


def main() -> None:
    rows = DraftRows(4)

    def propose(tokens: Sequence[int], k: int) -> list[int]:
        return [tokens[-1] + i + 1 for i in range(k)]

    ver = Verifier(rows, propose, lambda t, d: len(d) // 2)
    state = SpecState([1, 2, 3])
    ver.step(state, 4)
    ver.step_adaptive(state, 4)
    print(ver.decode([state, SpecState([7])], 3))
    MedusaRunner(rows, 3).run([1], propose)
    look = Lookahead(rows)
    look.on_hit()
    look.on_hit()
    look.on_miss()
    race(rows, [1], propose, propose)
    warm_draft(rows, [[1], [2]], propose)
    print("free", len(rows), "peak", rows.peak)


if __name__ == "__main__":
    main()
