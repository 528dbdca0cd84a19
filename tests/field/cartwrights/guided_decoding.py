"""Structured output: grammar matchers and token bitmasks for guided requests.

Compiling a grammar is slow and a matcher carries a big state table, so
matchers are recycled per grammar key.  Bitmasks are rows of one pinned
tensor; a row is lent to a request while its next token is constrained.
"""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Iterator, Optional

import torch

logger = logging.getLogger(__name__)


class GrammarError(ValueError):
    """The user's schema cannot be compiled."""


class MatcherState:
    def __init__(self, key: str, schema: dict[str, Any]) -> None:
        self.key = key
        self.schema = schema
        self.position = 0
        self.terminated = False

    def accept(self, token: int) -> bool:
        self.position += 1
        self.terminated = token == 2
        return token >= 0

    def rollback(self, count: int) -> None:
        if count > self.position:
            raise GrammarError(f"cannot roll back {count} of {self.position} tokens")
        self.position -= count
        self.terminated = False

    def reset(self) -> None:
        self.position = 0
        self.terminated = False


class MatcherStore:
    """Recycles matchers, at most ``limit`` of them alive at a time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.alive = 0
        self._parked: dict[str, list[MatcherState]] = {}

    def borrow(self, key: str, schema: dict[str, Any]) -> Optional[MatcherState]:
        shelf = self._parked.get(key)
        if shelf:
            matcher = shelf.pop()  # clean: returned to the caller
            matcher.reset()
            return matcher
        if self.alive >= self.limit and not self._trim():
            return None
        if "$ref" in json.dumps(schema):
            raise GrammarError("remote references are not supported")
        self.alive += 1
        return MatcherState(key, schema)

    def hand_back(self, matcher: MatcherState) -> None:
        self._parked.setdefault(matcher.key, []).append(matcher)

    def _trim(self) -> bool:
        for shelf in self._parked.values():
            if shelf:
                shelf.pop()  # clean: destroyed on purpose, and alive is lowered for it
                self.alive -= 1
                return True
        return False

    def take_fresh(self, key: str, max_position: int) -> Optional[MatcherState]:
        """A parked matcher that has seen few tokens, for the warm-up path."""
        shelf = self._parked.get(key, [])
        while shelf:
            matcher = shelf.pop()  # leak: matchers over the position bound are thrown away while alive still counts them
            if matcher.position <= max_position:
                return matcher
        return None


class MaskRows:
    def __init__(self, rows: int, vocab: int) -> None:
        self.table = torch.full((rows, (vocab + 31) // 32), -1, dtype=torch.int32)
        self._open = list(range(rows))

    def grab(self) -> int:
        """Index of a row, or -1."""
        if not self._open:
            return -1
        return self._open.pop()  # clean: returned

    def put(self, row: int) -> None:
        self.table[row].fill_(-1)
        self._open.append(row)


@dataclass
class GuidedRequest:
    request_id: str
    schema: Optional[dict[str, Any]] = None
    guided: bool = False
    matcher: Optional[MatcherState] = None
    draft_matcher: Optional[MatcherState] = None
    row: int = -1
    tokens: list[int] = field(default_factory=list)

    @property
    def key(self) -> str:
        return json.dumps(self.schema, sort_keys=True)


class GuidedDecodingManager:
    def __init__(self, max_matchers: int, rows: int, vocab: int, jump: bool = False) -> None:
        self.store = MatcherStore(max_matchers)
        self.masks = MaskRows(rows, vocab)
        self.jump = jump
        self._by_id: dict[str, GuidedRequest] = {}

    # -- admission -------------------------------------------------------

    def admit(self, req: GuidedRequest) -> bool:
        """Attach matcher and mask row; False keeps the request queued."""
        self._by_id[req.request_id] = req
        if req.schema is None:
            return True
        matcher = self.store.borrow(req.key, req.schema)  # leak: with no row left, False is returned and the matcher is in nobody's hands
        if matcher is None:
            return False
        row = self.masks.grab()  # clean: -1 is no row, otherwise it goes to the request and finish puts it back
        if row < 0:
            logger.debug("%s: no mask row", req.request_id)
            return False
        req.matcher, req.row, req.guided = matcher, row, True
        return True

    def admit_with_draft(self, req: GuidedRequest) -> bool:
        row = self.masks.grab()  # clean: put back on each of the three failing ways
        if row < 0:
            return False
        main = None
        try:
            main = self.store.borrow(req.key, req.schema or {})  # clean: handed back if the draft has none, else kept in the request
            draft = self.store.borrow(req.key, req.schema or {}) if main else None  # clean: None, or kept in the request
        except GrammarError:
            if main is not None:
                self.store.hand_back(main)
            self.masks.put(row)
            raise
        if draft is None:
            if main is not None:
                self.store.hand_back(main)
            self.masks.put(row)
            return False
        req.matcher, req.draft_matcher, req.row, req.guided = main, draft, row, True
        self._by_id[req.request_id] = req
        return True

    # -- stepping --------------------------------------------------------

    def accept(self, req: GuidedRequest, token: int) -> None:
        req.tokens.append(token)
        if not req.guided:
            return
        if not req.matcher.accept(token):
            raise GrammarError(f"{req.request_id}: token {token} is not allowed")
        if req.matcher.terminated:
            self.finish(req)

    def probe(self, key: str, schema: dict[str, Any], tokens: list[int]) -> int:
        """How many of ``tokens`` the grammar accepts."""
        matcher = self.store.borrow(key, schema)  # leak: the early return for a full match skips hand_back
        if matcher is None:
            return 0
        accepted = 0
        for token in tokens:
            if not matcher.accept(token):
                break
            accepted += 1
        else:
            return len(tokens)
        self.store.hand_back(matcher)
        return accepted

    def validate(self, schema: dict[str, Any]) -> bool:
        key = json.dumps(schema, sort_keys=True)
        try:
            matcher = self.store.borrow(key, schema)  # clean: GrammarError means none was lent, otherwise handed back
        except GrammarError:
            return False
        if matcher is not None:
            self.store.hand_back(matcher)
        return True

    @contextmanager
    def scratch_row(self) -> Iterator[int]:
        row = self.masks.grab()  # clean: the finally puts back every row but -1
        try:
            yield row
        finally:
            if row >= 0:
                self.masks.put(row)

    def jump_forward(self, req: GuidedRequest, count: int) -> Optional[torch.Tensor]:
        """Mask after ``count`` forced tokens, computed on a second matcher."""
        if not self.jump:
            return None
        twin = self.store.borrow(req.key, req.schema or {})  # leak: rollback raises when count exceeds the position, with no handler here
        if twin is None:
            return None
        with self.scratch_row() as row:  # clean: the context manager gives the row back
            if row < 0:
                self.store.hand_back(twin)
                return None
            for token in req.tokens:
                twin.accept(token)
            twin.rollback(count)
            mask = self.masks.table[row].clone()
        self.store.hand_back(twin)
        return mask

    def swap_schema(self, req: GuidedRequest, schema: dict[str, Any]) -> bool:
        if not req.guided:
            return False
        key = json.dumps(schema, sort_keys=True)
        fresh = self.store.borrow(key, schema)  # clean: stored in the request once the old one is handed back
        if fresh is None:
            return False
        if req.matcher is not None:
            self.store.hand_back(req.matcher)
        req.matcher, req.schema = fresh, schema
        return True

    def warm(self, key: str, schema: dict[str, Any]) -> None:
        matcher = self.store.take_fresh(key, 0) or self.store.borrow(key, schema)  # clean: whichever of the two, it is handed back unless None
        if matcher is None:
            return
        matcher.accept(0)
        self.store.hand_back(matcher)

    def finish(self, req: GuidedRequest) -> None:
        if not req.guided:
            return
        if req.matcher is not None:
            self.store.hand_back(req.matcher)
        if req.draft_matcher is not None:
            self.store.hand_back(req.draft_matcher)
        self.masks.put(req.row)
        req.matcher = req.draft_matcher = None
        req.row, req.guided = -1, False
        self._by_id.pop(req.request_id, None)
