"""Feature store client: sqlite connections behind a pool, sessions on top."""
from __future__ import annotations

import sqlite3
import threading
from contextlib import contextmanager
from typing import Iterator, Sequence


class PooledConnection:
    def __init__(self, raw: sqlite3.Connection, pool: "ConnectionPool") -> None:
        self.raw = raw
        self._pool = pool
        self.broken = False

    def execute(self, sql: str, args: Sequence = ()) -> list[tuple]:
        try:
            return self.raw.execute(sql, args).fetchall()
        except sqlite3.DatabaseError:
            self.broken = True
            return []

    def close(self) -> None:
        self._pool._release(self)


class ConnectionPool:
    def __init__(self, dsn: str, size: int = 8) -> None:
        self.dsn = dsn
        self._idle: set[PooledConnection] = set()
        self._busy: set[PooledConnection] = set()
        self._size = size
        self._lock = threading.RLock()

    def _make(self) -> PooledConnection:
        return PooledConnection(sqlite3.connect(self.dsn, check_same_thread=False), self)  # clean: the pool's own connection, closed by dispose or when broken

    def connection(self) -> PooledConnection | None:
        with self._lock:  # clean: with block
            if self._idle:
                conn = self._idle.pop()  # clean: handed to the caller through busy
            elif len(self._busy) < self._size:
                conn = self._make()  # clean: handed to the caller through busy
            else:
                return None
            self._busy.add(conn)
            return conn

    def _release(self, conn: PooledConnection) -> None:
        with self._lock:  # clean: with block
            self._busy.discard(conn)
            if conn.broken:
                conn.raw.close()
            else:
                self._idle.add(conn)

    def dispose(self) -> None:
        for conn in self._idle:
            conn.raw.close()
        self._idle.clear()


class Session:
    """Takes its connection lazily, or shares the one it was given."""

    def __init__(self, pool: ConnectionPool, conn: PooledConnection | None = None) -> None:
        self.pool = pool
        self.conn = conn
        self.owns = conn is None

    def _ensure(self) -> PooledConnection:
        if self.conn is None:
            self.conn = self.pool.connection()  # clean: near miss, only when the session owns it, close() gives it back
            if self.conn is None:
                raise TimeoutError("no connection")
        return self.conn

    def query(self, sql: str, args: Sequence = ()) -> list[tuple]:
        return self._ensure().execute(sql, args)

    def close(self) -> None:
        if self.owns and self.conn is not None:
            self.conn.close()
            self.conn = None


class FeatureStore:
    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool

    @contextmanager
    def session(self) -> Iterator[Session]:
        s = Session(self.pool)
        try:
            yield s
        finally:
            s.close()

    def features(self, entity: str) -> dict[str, float]:
        with self.session() as s:  # clean: the session closes its own connection
            return dict(s.query("select name, value from features where entity = ?", (entity,)))

    def features_for(self, entities: list[str]) -> dict[str, dict[str, float]]:
        conn = self.pool.connection()  # leak: the shared session does not own it, nobody closes the connection
        if conn is None:
            return {}
        s = Session(self.pool, conn)
        out = {}
        for entity in entities:
            out[entity] = dict(s.query("select name, value from features where entity = ?", (entity,)))
        s.close()
        return out

    def versions(self) -> list[int]:
        conn = self.pool.connection()  # clean: near miss, closed by the function though the session is not its owner
        if conn is None:
            return []
        s = Session(self.pool, conn)
        rows = s.query("select version from schema")
        s.close()
        conn.close()
        return [r[0] for r in rows]

    def latest(self, entity: str) -> tuple | None:
        conn = self.pool.connection()  # leak: no rows returns None and keeps the connection busy
        if conn is None:
            return None
        rows = conn.execute("select * from features where entity = ? order by ts desc limit 1", (entity,))
        if not rows:
            return None
        conn.close()
        return rows[0]

    def migrate(self, statements: list[str]) -> int:
        done = 0
        conn = self.pool.connection()  # leak: rebound after a broken statement without close
        for sql in statements:
            if conn is None:
                break
            conn.execute(sql)
            if conn.broken:
                conn = self.pool.connection()  # leak: rebound again when this one breaks as well
                continue
            done += 1
        if conn is not None:
            conn.close()
        return done
