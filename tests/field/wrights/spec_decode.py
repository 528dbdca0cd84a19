"""Speculative decoding: draft and target KV slots have to be had together."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Callable

logger = logging.getLogger(__name__)

Propose = Callable[[list[int], int], list[int]]
Verify = Callable[[list[int], list[int]], int]


class KVSlots:
    """Contiguous slot ranges out of a flat cache."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._holes: list[range] = [range(total)]

    def alloc(self, n: int) -> range | None:
        for i, hole in enumerate(self._holes):
            if len(hole) >= n:
                self._holes[i] = range(hole.start + n, hole.stop)
                self.used += n
                return range(hole.start, hole.start + n)
        return None

    def dealloc(self, slots: range) -> None:
        self.used -= len(slots)
        self._holes.append(slots)


@dataclass
class SpecState:
    tokens: list[int]
    draft: range | None = None
    target: range | None = None
    history: list[range] = field(default_factory=list)


class SpecWorker:
    def __init__(self, draft: KVSlots, target: KVSlots, propose: Propose, verify: Verify, k: int = 4) -> None:
        self.draft = draft
        self.target = target
        self.propose = propose
        self.verify = verify
        self.k = k
        self.adaptive = True
        self.trees: dict[int, list[range]] = {}

    def prepare(self, state: SpecState) -> bool:
        if state.target is not None:
            return True
        state.draft = self.draft.alloc(self.k)  # leak: no room in the target cache returns False, and the next prepare overwrites the field
        if state.draft is None:
            return False
        state.target = self.target.alloc(self.k + 1)  # clean: the state owns it, finish() deallocates
        if state.target is None:
            return False
        return True

    def finish(self, state: SpecState) -> None:
        if state.target is not None:
            if state.draft is not None:
                self.draft.dealloc(state.draft)
            self.target.dealloc(state.target)
        state.draft = state.target = None

    def prepare_retry(self, state: SpecState, attempts: int) -> bool:
        if state.target is not None:
            return True
        for _ in range(attempts):
            d = self.draft.alloc(self.k)  # clean: near miss, deallocated when its partner is missing
            if d is None:
                return False
            t = self.target.alloc(self.k + 1)  # clean: stored with its partner
            if t is None:
                self.draft.dealloc(d)
                self.k = max(1, self.k - 1)
                continue
            state.draft, state.target = d, t
            return True
        return False

    def step(self, state: SpecState) -> int:
        if not self.prepare_retry(state, 3):  # clean: finish() follows on every way on which it succeeded
            return 0
        proposal = self.propose(state.tokens, self.k)
        accepted = self.verify(state.tokens, proposal)
        state.tokens.extend(proposal[:accepted])
        self.finish(state)
        return accepted

    def step_once(self, tokens: list[int]) -> int:
        slots = self.draft.alloc(self.k)  # leak: an empty proposal returns early
        if slots is None:
            return 0
        proposal = self.propose(tokens, len(slots))
        if not proposal:
            return 0
        accepted = self.verify(tokens, proposal)
        self.draft.dealloc(slots)
        return accepted

    def step_bonus(self, tokens: list[int], bonus: bool) -> int:
        extra = self.target.alloc(1) if bonus else None  # clean: near miss, the same flag guards both ends
        proposal = self.propose(tokens, self.k)
        accepted = self.verify(tokens, proposal)
        if bonus and extra is not None:
            accepted += 1
            self.target.dealloc(extra)
        return accepted

    def step_adaptive(self, tokens: list[int]) -> int:
        held = None
        if self.adaptive:
            held = self.draft.alloc(self.k)  # leak: the low acceptance branch switches adaptive off before it guards the dealloc
        proposal = self.propose(tokens, self.k)
        accepted = self.verify(tokens, proposal)
        if proposal and accepted / len(proposal) < 0.3:
            self.adaptive = False
        if self.adaptive and held is not None:
            self.draft.dealloc(held)
        return accepted

    def grow(self, state: SpecState) -> bool:
        more = self.target.alloc(self.k)  # clean: kept in the history, which clear() empties
        if more is None:
            return False
        state.history.append(more)
        return True

    def rollback(self, state: SpecState, keep: int) -> None:
        while len(state.history) > keep:
            self.target.dealloc(state.history.pop())

    def clear(self, state: SpecState) -> None:
        self.rollback(state, 0)
        self.finish(state)

    # tree drafts

    def open_tree(self, root: int, widths: list[int]) -> bool:
        levels: list[range] = []
        for width in widths:
            level = self.draft.alloc(width)  # leak: prune() cuts the list short without a dealloc of the levels cut off
            if level is None:
                for done in levels:
                    self.draft.dealloc(done)
                return False
            levels.append(level)
        self.close_tree(root)
        self.trees[root] = levels
        return True

    def prune(self, root: int, depth: int) -> None:
        self.trees[root] = self.trees[root][:depth]

    def close_tree(self, root: int) -> None:
        for level in self.trees.pop(root, []):
            self.draft.dealloc(level)

    def try_widths(self, options: list[list[int]]) -> list[int]:
        """First option that fits."""
        for widths in options:
            got = [self.draft.alloc(w) for w in widths]  # clean: near miss, those that are not None are deallocated either way
            fits = all(g is not None for g in got)
            for g in got:
                if g is not None:
                    self.draft.dealloc(g)
            if fits:
                return widths
        return []

    def largest_width(self, limit: int) -> int:
        """Bisect for the widest level that can be had."""
        lo, hi = 0, limit
        probe: range | None = None
        while lo < hi:
            mid = (lo + hi + 1) // 2
            probe = self.draft.alloc(mid)  # leak: a successful probe is rebound by the next one, only the last is deallocated
            if probe is None:
                hi = mid - 1
            else:
                lo = mid
        if probe is not None:
            self.draft.dealloc(probe)
        return lo
