from __future__ import annotations

from typing import Callable, Dict, List, Optional

from .request import GenRequest
from .scheduler import Scheduler
from .slots import Row, RowTable, TokenPool


class Engine:
    def __init__(self, rows: int, tokens: int, model: Callable[[List[int]], int]) -> None:
        self.rows = RowTable(rows)
        self.tokens = TokenPool(tokens)
        self.scheduler = Scheduler(self.rows, self.tokens)
        self.model = model
        self.sessions: Dict[str, Row] = {}
        self._dummy: Optional[Row] = None

    def warm_up(self) -> int:
        row = self.rows.claim_or_raise()  # clean: surrendered in finally
        try:
            return self.model([0] * 4)
        finally:
            self.rows.surrender(row)

    def profile(self, lengths: List[int]) -> List[int]:
        results: List[int] = []
        for length in lengths:
            row = self.rows.claim_or_raise()  # leak: a length of zero continues without surrender
            if length == 0:
                results.append(0)
                continue
            row.length = length
            results.append(self.model([0] * length))
            self.rows.surrender(row)
        return results

    def open_session(self, sid: str) -> bool:
        if sid in self.sessions:
            return False
        row = self.rows.claim()  # clean: kept in sessions until close_session
        if row is None:
            return False
        self.sessions[sid] = row
        return True

    def rename_session(self, old: str, new: str) -> None:
        if new not in self.sessions:
            self.sessions[new] = self.sessions.pop(old)

    def close_session(self, sid: str) -> None:
        row = self.sessions.pop(sid, None)
        if row is not None:
            self.rows.surrender(row)

    def embed(self, prompt: List[int]) -> Optional[int]:
        """One forward pass without a session."""
        row = self.rows.claim()  # leak: not surrendered when the tokens are refused
        if row is None:
            return None
        kv = self.tokens.alloc(len(prompt))  # clean: freed below
        if kv is None:
            return None
        row.length = len(prompt)
        out = self.model(prompt)
        self.tokens.free(kv)
        self.rows.surrender(row)
        return out

    def step(self) -> List[GenRequest]:
        while self.scheduler.admit_next() is not None:
            pass
        for req in list(self.scheduler.running):
            if not self.scheduler.grow(req):
                continue
            req.output.append(self.model(req.prompt + req.output))
        return self.scheduler.retire_finished()

    def ensure_dummy(self) -> Row:
        if self._dummy is None:
            self._dummy = self.rows.claim_or_raise()  # clean: near miss, taken once, shutdown surrenders it
        return self._dummy

    def shutdown(self) -> None:
        for sid in list(self.sessions):
            self.close_session(sid)
        if self._dummy is not None:
            self.rows.surrender(self._dummy)
            self._dummy = None
