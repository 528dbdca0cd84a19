"""Structured output: compiled grammars, matchers and rows of the token bitmask."""
import json
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Optional

import torch

logger = logging.getLogger(__name__)


class Matcher:
    def __init__(self) -> None:
        self.schema: str = ""
        self.history: list[int] = []

    def accept(self, token: int) -> bool:
        if token < 0:
            return False
        self.history.append(token)
        return True

    def fill(self, row: torch.Tensor) -> None:
        row.fill_(-1)


class MatcherPool:
    def __init__(self, size: int) -> None:
        self._spare = [Matcher() for _ in range(size)]

    def rent(self, schema: str) -> Optional[Matcher]:
        if not self._spare:
            return None
        m = self._spare.pop()
        m.schema = schema
        return m

    def hand_back(self, m: Matcher) -> None:
        m.history.clear()
        self._spare.append(m)


class BitmaskRows:
    def __init__(self, rows: int, vocab: int) -> None:
        self.mask = torch.full((rows, (vocab + 31) // 32), -1, dtype=torch.int32)
        self._unused = list(range(rows))

    def claim_row(self) -> Optional[int]:
        return self._unused.pop(0) if self._unused else None

    def drop_row(self, row: int) -> None:
        self.mask[row].fill_(-1)
        self._unused.append(row)


class GrammarStore:
    def __init__(self) -> None:
        self._compiled: dict[str, Any] = {}
        self._refs: dict[str, int] = {}

    def ref(self, schema: str) -> bool:
        if schema not in self._compiled:
            try:
                self._compiled[schema] = json.loads(schema)
            except json.JSONDecodeError:
                return False
        self._refs[schema] = self._refs.get(schema, 0) + 1
        return True

    def unref(self, schema: str) -> None:
        self._refs[schema] -= 1
        if self._refs[schema] == 0:
            del self._refs[schema]
            del self._compiled[schema]


class Guide(NamedTuple):
    schema: str
    matcher: Matcher
    row: int


class StructuredOutputManager:
    def __init__(self, store: GrammarStore, matchers: MatcherPool, rows: BitmaskRows) -> None:
        self.store = store
        self.matchers = matchers
        self.rows = rows
        self.guides: dict[str, Guide] = {}
        self._executor = ThreadPoolExecutor(2)
        self._pending: dict[str, "Future[Optional[Matcher]]"] = {}

    def start(self, rid: str, schema: str) -> bool:
        if not self.store.ref(schema):  # clean: near miss, unreffed by both rollbacks and by stop()
            return False
        matcher = self.matchers.rent(schema)  # leak: with no row left only the grammar reference is rolled back
        if matcher is None:
            self.store.unref(schema)
            return False
        row = self.rows.claim_row()  # clean: part of the guide, stop() drops it
        if row is None:
            self.store.unref(schema)
            return False
        self.guides[rid] = Guide(schema, matcher, row)
        return True

    def stop(self, rid: str) -> None:
        fut = self._pending.pop(rid, None)
        if fut is not None:
            early = fut.result()
            if early is not None:
                self.matchers.hand_back(early)
        guide = self.guides.pop(rid, None)
        if guide is None:
            return
        self.rows.drop_row(guide.row)
        self.matchers.hand_back(guide.matcher)
        self.store.unref(guide.schema)

    def advance(self, rid: str, token: int) -> bool:
        guide = self.guides[rid]
        if not guide.matcher.accept(token):
            self.stop(rid)
            return False
        guide.matcher.fill(self.rows.mask[guide.row])
        return True

    def validate(self, schema: str, tokens: list[int]) -> bool:
        m = self.matchers.rent(schema)  # leak: the first rejected token returns False without handing back
        if m is None:
            return False
        for t in tokens:
            if not m.accept(t):
                return False
        self.matchers.hand_back(m)
        return True

    def prefix_len(self, schema: str, tokens: list[int]) -> int:
        m = self.matchers.rent(schema)  # clean: near miss, break leads to hand_back
        if m is None:
            return 0
        n = 0
        for t in tokens:
            if not m.accept(t):
                break
            n += 1
        self.matchers.hand_back(m)
        return n

    def regrammar(self, rid: str, schema: str) -> bool:
        guide = self.guides[rid]
        if not self.store.ref(schema):  # leak: the reference is kept when the same schema is set again
            return False
        if guide.schema == schema:
            return True
        self.store.unref(guide.schema)
        self.guides[rid] = guide._replace(schema=schema)
        return True

    def fork(self, rid: str, child: str) -> bool:
        guide = self.guides[rid]
        matcher = self.matchers.rent(guide.schema)  # clean: near miss, handed back if there is no row, else owned by the child's guide
        if matcher is None:
            return False
        row = self.rows.claim_row()  # clean: owned by the child's guide
        if row is None:
            self.matchers.hand_back(matcher)
            return False
        matcher.history.extend(guide.matcher.history)
        self.store.ref(guide.schema)  # clean: near miss, the child's stop() unrefs once
        self.guides[child] = Guide(guide.schema, matcher, row)
        return True

    def start_async(self, rid: str, schema: str) -> None:
        if rid not in self._pending:
            self._pending[rid] = self._executor.submit(self.matchers.rent, schema)  # clean: near miss, the future's matcher is taken up by poll or handed back by stop

    def poll(self, rid: str, schema: str) -> bool:
        fut = self._pending.get(rid)
        if fut is None or not fut.done():
            return False
        matcher = self._pending.pop(rid).result()
        if matcher is None:
            return False
        row = self.rows.claim_row()  # leak: an invalid schema ends here with the matcher handed back and the row not dropped
        if row is None:
            self.matchers.hand_back(matcher)
            return False
        if not self.store.ref(schema):  # clean: on success the guide carries it to stop()
            self.matchers.hand_back(matcher)
            return False
        self.guides[rid] = Guide(schema, matcher, row)
        return True

    def preview_mask(self, schema: str) -> Optional[torch.Tensor]:
        row = self.rows.claim_row()  # clean: near miss, the mask is cloned before the row is dropped
        if row is None:
            return None
        view = self.rows.mask[row].clone()
        self.rows.drop_row(row)
        return view
