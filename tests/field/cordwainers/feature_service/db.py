"""A small pool of database sessions."""
from __future__ import annotations

import sqlite3
import threading
from contextlib import contextmanager
from typing import Any, Iterator


class DbSession:
    def __init__(self, path: str) -> None:
        self.conn = sqlite3.connect(path, check_same_thread=False)
        self.in_tx = False

    def query(self, sql: str, *args: Any) -> list[tuple]:
        return self.conn.execute(sql, args).fetchall()

    def begin(self) -> None:
        self.conn.execute("BEGIN")
        self.in_tx = True

    def end(self, commit: bool) -> None:
        self.conn.commit() if commit else self.conn.rollback()
        self.in_tx = False


class DbPool:
    def __init__(self, path: str, size: int) -> None:
        self._cond = threading.Condition()
        self._idle = [DbSession(path) for _ in range(size)]
        self._busy: set[DbSession] = set()

    def getconn(self, timeout: float = 5.0) -> DbSession | None:
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._idle), timeout):
                return None
            s = self._idle.pop()
            self._busy.add(s)
            return s

    def putconn(self, s: DbSession | None) -> None:
        if s is None:
            return
        with self._cond:
            self._busy.discard(s)
            self._idle.append(s)
            self._cond.notify()

    @contextmanager
    def session(self) -> Iterator[DbSession]:
        s = self.getconn(timeout=30.0)  # clean: finally puts it back
        try:
            yield s
        finally:
            self.putconn(s)

    @contextmanager
    def transaction(self) -> Iterator[DbSession]:
        with self.session() as s:  # clean: context manager
            s.begin()
            yield s
            s.end(commit=True)

    @contextmanager
    def snapshot(self) -> Iterator[DbSession | None]:
        """Read-only view. Yields None when the pool is exhausted."""
        s = self.getconn()  # leak: after the yield the transaction is ended but the session is not put back
        if s is None:
            yield None
            return
        s.begin()
        yield s
        s.end(commit=False)
