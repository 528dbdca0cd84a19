"""Transaction scopes over pooled sessions."""

from __future__ import annotations

import sqlite3
from types import TracebackType
from typing import Callable, Optional, Type, TypeVar

from .pools import Session, SessionPool

R = TypeVar("R")


class Transaction:
    """``with Transaction(pool) as sess``; joins an outer session if given."""

    def __init__(self, pool: SessionPool, outer: Optional[Session] = None) -> None:
        self._pool = pool
        self._owned = outer is None
        self._sess = outer

    def __enter__(self) -> Session:
        if self._owned:
            self._sess = self._pool.check_out()  # clean: __exit__ checks in exactly when _owned is set
        self._sess.depth += 1
        return self._sess

    def __exit__(
        self, tp: Optional[Type[BaseException]], exc: Optional[BaseException], tb: Optional[TracebackType]
    ) -> bool:
        sess, sess_owned = self._sess, self._owned
        sess.depth -= 1
        try:
            if tp is None:
                sess.conn.commit()
            else:
                sess.stale = issubclass(tp, sqlite3.OperationalError)
                sess.conn.rollback()
        finally:
            if sess_owned:
                self._sess = None
                self._pool.check_in(sess)
        return False


class ReadScope:
    """Read-only scope; a missing table counts as an empty result."""

    def __init__(self, pool: SessionPool) -> None:
        self._pool = pool
        self.sess: Optional[Session] = None

    def __enter__(self) -> Session:
        self.sess = self._pool.check_out()  # leak: for an OperationalError __exit__ swallows it and returns before check_in
        return self.sess

    def __exit__(self, tp, exc, tb) -> bool:
        if tp is not None and issubclass(tp, sqlite3.OperationalError):
            return True
        self._pool.check_in(self.sess)
        self.sess = None
        return False


def in_transaction(pool: SessionPool, fn: Callable[[Session], R]) -> R:
    with Transaction(pool) as sess:  # clean: the transaction owns the session and checks it in
        return fn(sess)


def adopt(pool: SessionPool, fn: Callable[[Session], bool]) -> Optional[Session]:
    """Check out a session that ``fn`` approves of; the caller owns it."""
    sess = pool.check_out()  # clean: checked in when not approved, owned by the caller when approved
    if not fn(sess):
        pool.check_in(sess)
        return None
    return sess
