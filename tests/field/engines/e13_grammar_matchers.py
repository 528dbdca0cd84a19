"""Structured output: compiled grammars, their matchers and token bitmasks."""
from __future__ import annotations

from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Generator, Optional

import torch


class Matcher:
    def __init__(self, key: str, allowed: dict[int, set[int]]) -> None:
        self.key = key
        self.allowed = allowed
        self.state = 0

    def accept(self, token: int) -> bool:
        if token not in self.allowed.get(self.state, set()):
            return False
        self.state = token
        return True

    def reset(self) -> None:
        self.state = 0


@dataclass
class StructuredRequest:
    req_id: str
    grammar_key: str
    matcher: Optional[Matcher] = None
    mask_row: int = -1
    future: Optional["Future[Matcher]"] = None


class MatcherPool:
    """Reuses matchers by grammar key. Idle ones wait in ``_idle``."""

    def __init__(self, grammars: dict[str, dict[int, set[int]]], per_key: int = 4) -> None:
        self._grammars = grammars
        self._idle: dict[str, list[Matcher]] = {
            k: [Matcher(k, g) for _ in range(per_key)] for k, g in grammars.items()
        }

    def get(self, key: str) -> Optional[Matcher]:
        idle = self._idle.get(key)
        if not idle:
            return None
        m = idle.pop()  # clean: reset and returned
        m.reset()
        return m

    def put_back(self, m: Matcher) -> None:
        self._idle[m.key].append(m)


class MaskRows:
    """Row numbers of the shared bitmask tensor."""

    def __init__(self, rows: int, vocab: int) -> None:
        self.mask = torch.ones(rows, vocab, dtype=torch.bool)
        self._rows = set(range(rows))

    def take_row(self) -> int:
        if not self._rows:
            return -1
        return self._rows.pop()  # clean: returned

    def give_back_row(self, row: int) -> None:
        self.mask[row].fill_(True)
        self._rows.add(row)


class GrammarBackend:
    """Attaches matchers and rows to requests; compiles in the background."""

    def __init__(self, matchers: MatcherPool, rows: MaskRows, executor: Executor) -> None:
        self.matchers = matchers
        self.rows = rows
        self.executor = executor

    def attach(self, req: StructuredRequest) -> bool:
        """Give ``req`` a matcher and a row, both or neither."""
        if req.matcher is not None:
            return True
        m = self.matchers.get(req.grammar_key)  # clean: near miss, put back when no row is left
        if m is None:
            return False
        row = self.rows.take_row()  # clean: set on the request, detach gives it back
        if row < 0:
            self.matchers.put_back(m)
            return False
        req.matcher, req.mask_row = m, row
        return True

    def detach(self, req: StructuredRequest) -> None:
        fut, req.future = req.future, None
        if fut is not None:
            late = fut.result()
            if late is not None:
                self.matchers.put_back(late)
        if req.matcher is not None:
            self.matchers.put_back(req.matcher)
            req.matcher = None
        if req.mask_row >= 0:
            self.rows.give_back_row(req.mask_row)
            req.mask_row = -1

    def attach_row_first(self, req: StructuredRequest) -> bool:
        if req.matcher is not None:
            return True
        row = self.rows.take_row()  # leak: stays taken when the grammar has no idle matcher
        if row == -1:
            return False
        m = self.matchers.get(req.grammar_key)  # clean: None or set on the request
        if m is None:
            return False
        req.matcher, req.mask_row = m, row
        return True

    def validate(self, key: str, tokens: list[int]) -> bool:
        """Would ``tokens`` be accepted by the grammar from its start?"""
        m = self.matchers.get(key)  # leak: a rejected token returns before the matcher is put back
        if m is None:
            return False
        for tok in tokens:
            if not m.accept(tok):
                return False
        self.matchers.put_back(m)
        return True

    def validate_all(self, key: str, tokens: list[int]) -> bool:
        m = self.matchers.get(key)  # clean: near miss, all() stops early but the call always comes back here
        if m is None:
            return False
        ok = all(m.accept(tok) for tok in tokens)
        self.matchers.put_back(m)
        return ok

    def allowed_tokens(self, key: str, prefix: list[int]) -> Generator[set[int], None, None]:
        """Yield the allowed set after each token of ``prefix``."""
        m = self.matchers.get(key)  # clean: near miss, a consumer that stops early closes the generator into finally
        if m is None:
            return
        try:
            for tok in prefix:
                if not m.accept(tok):
                    return
                yield m.allowed.get(m.state, set())
        finally:
            self.matchers.put_back(m)

    def fill_masks(self, reqs: list[StructuredRequest]) -> torch.Tensor:
        for req in reqs:
            if req.matcher is None or req.mask_row < 0:
                continue
            row = self.rows.mask[req.mask_row]
            row.fill_(False)
            row[list(req.matcher.allowed.get(req.matcher.state, ()))] = True
        return self.rows.mask

    def attach_async(self, req: StructuredRequest) -> None:
        """Wait for a matcher on the executor; ``poll`` picks it up."""
        if req.future is None:
            req.future = self.executor.submit(self._wait_matcher, req.grammar_key)

    def _wait_matcher(self, key: str, tries: int = 1000) -> Optional[Matcher]:
        for _ in range(tries):
            m = self.matchers.get(key)  # clean: returned as the result of the future
            if m is not None:
                return m
        return None

    def poll(self, req: StructuredRequest) -> bool:
        if req.future is None or not req.future.done():
            return False
        fut, req.future = req.future, None
        m = fut.result()
        if m is None:
            return False
        row = self.rows.take_row()  # clean: near miss, without one the matcher goes back and nothing is kept
        if row < 0:
            self.matchers.put_back(m)
            return False
        self.detach(req)
        req.matcher, req.mask_row = m, row
        return True
