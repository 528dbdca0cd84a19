"""Bounded pool of database connections, with a second pool for the read replicas layered on top."""
from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import Callable, Optional


class PoolTimeout(Exception):
    pass


class Connection:
    def __init__(self, raw, number: int) -> None:
        self.raw = raw
        self.number = number
        self.broken = False
        self.read_only = False
        self.in_tx = False
        self.last_used = time.monotonic()

    def execute(self, sql: str, *params):
        self.last_used = time.monotonic()
        return self.raw.execute(sql, params)

    def ping(self) -> bool:
        return not self.broken and bool(self.raw.is_alive())


class ConnectionPool:
    def __init__(self, connect: Callable[[], object], size: int) -> None:
        self._connect = connect
        self._size = size
        self._made = 0
        self._idle: list[Connection] = []
        self._cond = threading.Condition()

    def checkout(self, timeout: float = 5.0) -> Connection:
        deadline = time.monotonic() + timeout
        with self._cond:
            while True:
                if self._idle:
                    return self._idle.pop()
                if self._made < self._size:
                    self._made += 1
                    return Connection(self._connect(), self._made)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PoolTimeout("no connection within %.1fs" % timeout)
                self._cond.wait(left)

    def checkout_nowait(self) -> Optional[Connection]:
        with self._cond:
            return self._idle.pop() if self._idle else None

    def checkin(self, conn: Connection) -> None:
        with self._cond:
            conn.read_only = False
            conn.in_tx = False
            self._idle.append(conn)
            self._cond.notify()

    def discard(self, conn: Connection) -> None:
        with self._cond:
            self._made -= 1
            self._cond.notify()
        conn.raw.close()

    @contextmanager
    def borrowed(self, timeout: float = 5.0):
        conn = self.checkout(timeout)  # clean: checked in by the finally
        try:
            yield conn
        finally:
            if conn.broken:
                self.discard(conn)
            else:
                self.checkin(conn)


class ReplicaPool:
    """Keeps one connection per replica checked out of its pool and lends it on."""

    def __init__(self, pools: dict[str, ConnectionPool], max_idle: float) -> None:
        self.pools = pools
        self.max_idle = max_idle
        self._parked: dict[str, Connection] = {}
        self._lent: dict[str, list[Connection]] = {}

    def lend(self, replica: str) -> Connection:
        conn = self._parked.pop(replica, None)
        if conn is not None and time.monotonic() - conn.last_used > self.max_idle:
            self.pools[replica].discard(conn)
            conn = None
        if conn is None:
            conn = self.pools[replica].checkout()  # clean: near miss, lent on, take_back ends it
        self._lent.setdefault(replica, []).append(conn)
        return conn

    def take_back(self, replica: str) -> None:
        conn = self._lent[replica].pop()
        if replica in self._parked:
            self.pools[replica].checkin(conn)
        else:
            self._parked[replica] = conn

    def warm(self) -> None:
        """Run by the keep-alive timer, once a minute."""
        for replica, pool in self.pools.items():
            self._parked[replica] = pool.checkout()  # leak: overwrites a connection that is parked already

    def drain(self) -> None:
        for replica, conn in self._parked.items():
            self.pools[replica].checkin(conn)
        self._parked.clear()


class WriterPin:
    """Binds one writer connection to one aggregate until the aggregate is unpinned."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool
        self._by_aggregate: dict[str, Connection] = {}

    def pin(self, aggregate: str) -> Connection:
        conn = self._by_aggregate.get(aggregate)
        if conn is None or not conn.ping():
            conn = self.pool.checkout()  # leak: the dead one found by ping() is overwritten, never discarded
            self._by_aggregate[aggregate] = conn
        return conn

    def unpin(self, aggregate: str) -> None:
        conn = self._by_aggregate.pop(aggregate, None)
        if conn is not None:
            self.pool.checkin(conn)
