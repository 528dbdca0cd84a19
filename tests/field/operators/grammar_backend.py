"""Structured output: compiled grammars, matchers and token bitmasks."""
from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field

import torch


@dataclass
class Grammar:
    key: str
    transitions: dict[tuple[int, int], int] = field(default_factory=dict)
    accepting: frozenset[int] = frozenset()


@dataclass
class Matcher:
    """Position of one request in its grammar."""

    grammar: Grammar
    state: int = 0
    history: list[int] = field(default_factory=list)

    def accept(self, token: int) -> bool:
        nxt = self.grammar.transitions.get((self.state, token))
        if nxt is None:
            return False
        self.history.append(self.state)
        self.state = nxt
        return True

    def reset(self) -> None:
        self.state = 0
        self.history.clear()


class MatcherCache:
    """Matchers for reuse, one bucket per grammar."""

    def __init__(self, limit: int = 64) -> None:
        self.limit = limit
        self._buckets: dict[str, list[Matcher]] = defaultdict(list)
        self._count = threading.Semaphore(limit)

    def acquire_matcher(self, grammar: Grammar, blocking: bool = True) -> Matcher | None:
        if not self._count.acquire(blocking=blocking):  # clean: near miss, the permit goes with the matcher, release_matcher() returns it
            return None
        bucket = self._buckets[grammar.key]
        matcher = bucket.pop() if bucket else Matcher(grammar)  # clean: to the caller
        matcher.reset()
        return matcher

    def release_matcher(self, matcher: Matcher) -> None:
        self._buckets[matcher.grammar.key].append(matcher)
        self._count.release()


class BitmaskRows:
    """Rows of the vocabulary bitmask tensor; a counter plus returned rows."""

    def __init__(self, rows: int, vocab: int) -> None:
        self.mask = torch.zeros(rows, (vocab + 31) // 32, dtype=torch.int32)
        self._next = 0
        self._returned: list[int] = []

    def next_row(self) -> int:
        if self._returned:
            return self._returned.pop()  # clean: to the caller
        if self._next == self.mask.shape[0]:
            raise IndexError("bitmask is full")
        row, self._next = self._next, self._next + 1  # clean: a row never used before, to the caller
        return row

    def return_row(self, row: int) -> None:
        self.mask[row].fill_(-1)
        self._returned.append(row)


@dataclass
class GuidedRequest:
    rid: str
    grammar: Grammar | None = None
    matcher: Matcher | None = None
    row: int | None = None


class GrammarBackend:
    """Attaches matchers and mask rows to guided requests."""

    def __init__(self, matchers: MatcherCache, rows: BitmaskRows) -> None:
        self.matchers = matchers
        self.rows = rows
        self.grammars: dict[str, Grammar] = {}

    def attach(self, req: GuidedRequest) -> bool:
        """Called when the request enters the batch."""
        if req.grammar is None or req.matcher is not None:
            return True
        matcher = self.matchers.acquire_matcher(req.grammar, blocking=False)  # leak: the handler for a full bitmask forgets the matcher
        if matcher is None:
            return False
        try:
            row = self.rows.next_row()  # clean: kept in the request until detach()
        except IndexError:
            return False
        req.matcher, req.row = matcher, row
        return True

    def detach(self, req: GuidedRequest) -> None:
        if req.grammar is None:
            return
        if req.matcher is not None:
            self.matchers.release_matcher(req.matcher)
            req.matcher = None
        if req.row is not None:
            self.rows.return_row(req.row)
            req.row = None

    def fill_masks(self, reqs: list[GuidedRequest]) -> list[int]:
        """Write the allowed tokens of each request; returns the rows used."""
        used: list[int] = []
        for req in reqs:
            if req.matcher is None:
                continue
            mask = self.rows.mask[req.row]
            mask.zero_()
            for state, token in req.grammar.transitions:
                if state == req.matcher.state:
                    mask[token // 32] |= 1 << (token % 32)
            used.append(req.row)
        return used

    def fork(self, parent: GuidedRequest, child: GuidedRequest) -> bool:
        """Start the child at the parent's position."""
        if parent.matcher is None or child.matcher is not None:
            return False
        child.grammar = parent.grammar
        child.matcher = self.matchers.acquire_matcher(parent.grammar)  # clean: near miss, detach() releases it without a row as well
        child.matcher.state = parent.matcher.state
        child.row = None
        return True

    def validate(self, key: str, tokens: list[int]) -> bool:
        """Whether a finished output is a word of the grammar."""
        grammar = self.grammars.get(key)
        if grammar is None:
            return False
        matcher = self.matchers.acquire_matcher(grammar)  # leak: a refused token returns without releasing it
        for token in tokens:
            if not matcher.accept(token):
                return False
        ok = matcher.state in grammar.accepting
        self.matchers.release_matcher(matcher)
        return ok

    def jump_forward(self, req: GuidedRequest, limit: int = 16) -> list[int]:
        """Tokens that the grammar forces from here on."""
        probe = self.matchers.acquire_matcher(req.grammar, blocking=False)  # clean: near miss, every break ends at the release
        if probe is None:
            return []
        probe.state = req.matcher.state
        forced: list[int] = []
        while len(forced) < limit:
            options = [t for (s, t) in req.grammar.transitions if s == probe.state]
            if len(options) != 1 or not probe.accept(options[0]):
                break
            forced.append(options[0])
        self.matchers.release_matcher(probe)
        return forced

    def switch(self, req: GuidedRequest, grammar: Grammar) -> None:
        """Continue a request under another grammar (tool calls)."""
        req.grammar = grammar
        req.matcher = self.matchers.acquire_matcher(grammar)  # leak: overwrites the matcher of the previous grammar
        if req.row is None:
            req.row = self.rows.next_row()  # clean: near miss, taken only when the request has none

    def scratch_mask(self) -> torch.Tensor:
        """A copy of an all-ones row, for warm-up."""
        row = self.rows.next_row()  # leak: the copy is returned, the row itself is dropped
        return self.rows.mask[row].clone().fill_(-1)
