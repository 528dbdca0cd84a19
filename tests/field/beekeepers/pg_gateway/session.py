"""Unit of work over a pooled connection."""
from __future__ import annotations

import logging
from typing import Optional

from .pool import Connection, ConnectionPool

log = logging.getLogger("pg.session")


class Session:
    """A session owns its connection from begin() to commit(), rollback() or close()."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool
        self.conn: Optional[Connection] = None
        self.statements = 0

    def begin(self) -> "Session":
        if self.conn is None:
            self.conn = self.pool.checkout()  # clean: near miss, _finish gives it back
            self.conn.execute("BEGIN")
            self.conn.in_tx = True
        return self

    def run(self, sql: str, *params):
        self.statements += 1
        return self.conn.execute(sql, *params)

    def commit(self) -> None:
        self.conn.execute("COMMIT")
        self._finish()

    def rollback(self) -> None:
        if self.conn is not None:
            self.conn.execute("ROLLBACK")
            self._finish()

    def close(self) -> None:
        if self.conn is not None and self.conn.in_tx:
            self.rollback()
        else:
            self._finish()

    def _finish(self) -> None:
        if self.conn is None:
            return
        conn, self.conn = self.conn, None
        if conn.broken:
            self.pool.discard(conn)
        else:
            self.pool.checkin(conn)

    def __enter__(self) -> "Session":
        return self.begin()  # clean: __exit__ commits or rolls back

    def __exit__(self, kind, value, trace) -> None:
        if kind is None:
            self.commit()
        else:
            self.rollback()


class ReadSession:
    """Short read-only session. Usable as a context manager only."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool
        self.conn: Optional[Connection] = None
        self.rows = 0

    def __enter__(self) -> "ReadSession":
        self.conn = self.pool.checkout(1.0)  # leak: __exit__ returns early when no row was read
        self.conn.read_only = True
        return self

    def fetch(self, sql: str, *params) -> list:
        rows = list(self.conn.execute(sql, *params))
        self.rows += len(rows)
        return rows

    def __exit__(self, kind, value, trace) -> bool:
        if self.rows == 0:
            log.debug("empty read session")
            return False
        self.conn.execute("ROLLBACK")
        self.pool.checkin(self.conn)
        self.conn = None
        return False


class SessionFactory:
    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool
        self.opened = 0

    def open(self) -> Session:
        self.opened += 1
        return Session(self.pool).begin()  # clean: the caller owns the session

    def scoped(self) -> Session:
        return Session(self.pool)


class Savepoints:
    """Connection with a stack of savepoints; the outermost release gives the connection back."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool
        self.conn: Optional[Connection] = None
        self.depth = 0

    def push(self) -> None:
        if self.depth == 0:
            self.conn = self.pool.checkout()  # clean: near miss, pop() checks in at depth zero
        self.depth += 1
        self.conn.execute("SAVEPOINT s%d" % self.depth)

    def pop(self) -> None:
        self.conn.execute("RELEASE SAVEPOINT s%d" % self.depth)
        self.depth -= 1
        if self.depth == 0:
            self.pool.checkin(self.conn)
            self.conn = None
