"""Guided decoding: token bitmasks and matcher states."""
from __future__ import annotations

import json
import threading
from typing import Any, Dict, List, Mapping, Optional

import torch


class MatcherState:
    __slots__ = ("schema", "pos", "dead")

    def __init__(self) -> None:
        self.schema: Any = None
        self.pos = 0
        self.dead = False

    def feed(self, tok: int) -> bool:
        self.pos += 1
        self.dead = self.dead or tok < 0
        return not self.dead


class MatcherPool:
    def __init__(self, size: int) -> None:
        self._spare = [MatcherState() for _ in range(size)]
        self._lock = threading.Lock()

    def obtain(self, schema: Any) -> MatcherState:
        self._lock.acquire()  # clean: released in the finally
        try:
            st = self._spare.pop() if self._spare else MatcherState()
        finally:
            self._lock.release()
        st.schema, st.pos, st.dead = schema, 0, False
        return st

    def recycle(self, st: MatcherState) -> None:
        self._lock.acquire()  # clean: released on the next but one line
        self._spare.append(st)
        self._lock.release()

    def purge(self, max_keep: int) -> int:
        self._lock.acquire()  # leak: the shortcut for small pools returns with the lock held
        n = len(self._spare)
        if n <= max_keep:
            return 0
        del self._spare[max_keep:]
        self._lock.release()
        return n - max_keep


class MaskRows:
    def __init__(self, rows: int, vocab: int) -> None:
        self.mask = torch.full((rows, (vocab + 31) // 32), -1, dtype=torch.int32)
        self._idle = set(range(rows))

    def lock_row(self) -> Optional[int]:
        return self._idle.pop() if self._idle else None

    def unlock_row(self, row: int) -> None:
        self.mask[row].fill_(-1)
        self._idle.add(row)


class GuidedRequest:
    def __init__(self, rid: str, schema_text: str) -> None:
        self.rid = rid
        self.schema_text = schema_text
        self.matcher: Optional[MatcherState] = None
        self.row: Optional[int] = None


class GuidedDecoder:
    def __init__(self, matchers: MatcherPool, rows: MaskRows) -> None:
        self.matchers = matchers
        self.rows = rows
        self.live: Dict[str, GuidedRequest] = {}
        self.fallback: Optional[MatcherState] = None

    def begin(self, req: GuidedRequest) -> bool:
        try:
            schema = json.loads(req.schema_text)
        except json.JSONDecodeError:
            return False
        row = self.rows.lock_row()  # clean: kept in the request that end unlocks
        if row is None:
            return False
        req.row = row
        req.matcher = self.matchers.obtain(schema)  # clean: end recycles it
        self.live[req.rid] = req
        return True

    def begin_lazy(self, req: GuidedRequest) -> bool:
        row = self.rows.lock_row()  # leak: a schema that does not parse is swallowed with the row locked
        if row is None:
            return False
        try:
            schema = json.loads(req.schema_text)
        except json.JSONDecodeError:
            return False
        req.row = row
        req.matcher = self.matchers.obtain(schema)  # clean: end recycles it
        self.live[req.rid] = req
        return True

    def end(self, rid: str) -> None:
        req = self.live.pop(rid, None)
        if req is None:
            return
        if req.matcher is not None:
            self.matchers.recycle(req.matcher)
            req.matcher = None
        if req.row is not None:
            self.rows.unlock_row(req.row)
            req.row = None

    def advance(self, rid: str, tok: int) -> bool:
        req = self.live[rid]
        if req.matcher.feed(tok):
            return True
        self.end(rid)
        return False

    def rewind(self, rid: str, tokens: List[int]) -> bool:
        req = self.live[rid]
        fresh = self.matchers.obtain(req.matcher.schema)  # leak: a token that fails leaves the fresh matcher behind
        for t in tokens:
            if not fresh.feed(t):
                return False
        self.matchers.recycle(req.matcher)
        req.matcher = fresh
        return True

    def reset(self, rid: str, schema: Mapping[str, Any]) -> None:
        req = self.live[rid]
        old = req.matcher
        req.matcher = self.matchers.obtain(schema)  # clean: near miss, the overwritten one was saved and is recycled
        if old is not None:
            self.matchers.recycle(old)

    def set_fallback(self, schema: Mapping[str, Any]) -> None:
        self.fallback = self.matchers.obtain(schema)  # leak: the fallback set before is overwritten, shutdown sees only the last

    def validate(self, schema: Any, tokens: List[int]) -> bool:
        st = self.matchers.obtain(schema)  # clean: recycled after all()
        ok = all(st.feed(t) for t in tokens)
        self.matchers.recycle(st)
        return ok

    def shutdown(self) -> None:
        for rid in list(self.live):
            self.end(rid)
        if self.fallback is not None:
            self.matchers.recycle(self.fallback)
            self.fallback = None
