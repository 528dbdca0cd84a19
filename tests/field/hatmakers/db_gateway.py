"""Gateway between the order API and the ledger database: pooled connections, queries and maintenance jobs."""
from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Iterator, Optional

log = logging.getLogger(__name__)


class PoolTimeout(RuntimeError):
    pass


class Connection:
    def __init__(self, dsn: str, number: int) -> None:
        self.dsn = dsn
        self.number = number
        self.in_tx = False
        self.born = time.monotonic()

    def execute(self, sql: str, *args: Any) -> list[tuple]:
        log.debug("conn %d: %s %r", self.number, sql, args)
        return []

    def begin(self) -> None:
        self.in_tx = True

    def commit(self) -> None:
        self.in_tx = False

    def rollback(self) -> None:
        self.in_tx = False

    def ping(self) -> bool:
        return time.monotonic() - self.born < 3600


class ConnectionPool:
    def __init__(self, dsn: str, size: int) -> None:
        self.dsn = dsn
        self._cond = threading.Condition()
        self._idle: deque[Connection] = deque(Connection(dsn, i) for i in range(size))
        self._busy: dict[int, Connection] = {}
        self._serial = size

    def checkout(self, timeout: float = 5.0) -> Connection:
        with self._cond:
            if not self._cond.wait_for(lambda: len(self._idle) > 0, timeout):
                raise PoolTimeout(self.dsn)
            conn = self._idle.popleft()
            self._busy[conn.number] = conn
            return conn

    def try_checkout(self) -> Optional[Connection]:
        with self._cond:
            if not self._idle:
                return None
            conn = self._idle.popleft()
            self._busy[conn.number] = conn
            return conn

    def checkin(self, conn: Connection) -> None:
        with self._cond:
            self._busy.pop(conn.number, None)
            self._idle.append(conn)
            self._cond.notify()

    def discard(self, conn: Connection) -> None:
        """Throws a connection away and puts a fresh one in its place."""
        with self._cond:
            self._busy.pop(conn.number, None)
            self._serial += 1
            self._idle.append(Connection(self.dsn, self._serial))
            self._cond.notify()

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        conn = self.checkout()  # clean: given back in finally after the body
        try:
            yield conn
        finally:
            self.checkin(conn)


class UnitOfWork:
    """A transaction that lives across several calls of the API layer."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._conn: Optional[Connection] = None
        self._statements = 0

    def start(self) -> None:
        if self._conn is not None:
            return
        self._conn = self._pool.checkout()  # leak: abandon() clears the field without a checkin
        self._conn.begin()

    def run(self, sql: str, *args: Any) -> list[tuple]:
        assert self._conn is not None
        self._statements += 1
        return self._conn.execute(sql, *args)

    def complete(self) -> int:
        if self._conn is None:
            return 0
        self._conn.commit()
        self._pool.checkin(self._conn)
        self._conn = None
        return self._statements

    def abandon(self) -> None:
        if self._conn is None:
            return
        self._conn.rollback()
        log.info("unit of work abandoned after %d statements", self._statements)
        self._conn = None
        self._statements = 0


class SnapshotReader:
    """Keeps one connection with a repeatable-read transaction for a report."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._conn: Optional[Connection] = None

    def open(self) -> None:
        self._conn = self._pool.checkout()  # clean: near miss, close() discards or checks in on every branch
        self._conn.begin()

    def count(self, table: str) -> int:
        assert self._conn is not None
        rows = self._conn.execute(f"select count(*) from {table}")
        return rows[0][0] if rows else 0

    def close(self) -> None:
        conn, self._conn = self._conn, None
        if conn is None:
            return
        conn.rollback()
        if conn.ping():
            self._pool.checkin(conn)
        else:
            self._pool.discard(conn)


@dataclass
class Customer:
    ident: int
    email: str


class Gateway:
    def __init__(self, primary: ConnectionPool, replica: ConnectionPool) -> None:
        self.primary = primary
        self.replica = replica
        self.misses = 0

    def order_total(self, order_id: int) -> int:
        with self.replica.connection() as conn:  # clean: context manager of the pool
            rows = conn.execute("select sum(cents) from lines where order_id = ?", order_id)
            if not rows:
                return 0
            return rows[0][0]

    def find_customer(self, email: str) -> Optional[Customer]:
        conn = self.replica.checkout()  # leak: the return for an unknown address skips the checkin
        rows = conn.execute("select id, email from customers where email = ?", email.lower())
        if not rows:
            self.misses += 1
            return None
        customer = Customer(*rows[0])
        self.replica.checkin(conn)
        return customer

    def transfer(self, source: int, target: int, cents: int) -> bool:
        conn = self.primary.checkout()  # clean: near miss, early return runs through finally
        try:
            conn.begin()
            rows = conn.execute("select balance from accounts where id = ?", source)
            if not rows or rows[0][0] < cents:
                conn.rollback()
                return False
            conn.execute("update accounts set balance = balance - ? where id = ?", cents, source)
            conn.execute("update accounts set balance = balance + ? where id = ?", cents, target)
            conn.commit()
            return True
        finally:
            self.primary.checkin(conn)

    def copy_prices(self) -> int:
        src = self.replica.checkout()  # leak: not given back where the primary has nothing idle
        dst = self.primary.try_checkout()  # clean: None-checked, given back at the end
        if dst is None:
            log.warning("primary is busy, price copy postponed")
            return 0
        copied = 0
        for sku, cents in src.execute("select sku, cents from prices"):
            dst.execute("insert into prices values (?, ?)", sku, cents)
            copied += 1
        self.primary.checkin(dst)
        self.replica.checkin(src)
        return copied

    def probe(self, rounds: int) -> int:
        healthy = 0
        for _ in range(rounds):
            conn = self.replica.checkout()  # leak: continue for a dead connection skips the checkin
            if not conn.ping():
                log.info("connection %d does not answer", conn.number)
                continue
            healthy += 1
            self.replica.checkin(conn)
        return healthy

    def refresh(self, rounds: int) -> int:
        replaced = 0
        for _ in range(rounds):
            conn = self.primary.try_checkout()  # clean: near miss, a dead one goes through discard before continue
            if conn is None:
                break
            if not conn.ping():
                self.primary.discard(conn)
                replaced += 1
                continue
            self.primary.checkin(conn)
        return replaced

    def vacuum(self, table: str) -> None:
        conn = self.primary.checkout()  # leak: the name is rebound to a second connection
        if conn.in_tx:
            conn.rollback()
            conn = self.primary.checkout()  # clean: given back below
        conn.execute(f"vacuum {table}")
        self.primary.checkin(conn)

    def stream_orders(self, since: int, page: int = 500) -> Iterator[tuple]:
        conn = self.replica.checkout()  # clean: near miss, generator gives back in finally
        try:
            last = since
            while True:
                rows = conn.execute("select id, cents from orders where id > ? limit ?", last, page)
                if not rows:
                    return
                yield from rows
                last = rows[-1][0]
        finally:
            self.replica.checkin(conn)

    def stream_refunds(self, since: int, page: int = 500) -> Iterator[tuple]:
        conn = self.replica.checkout()  # leak: an empty first page returns from the generator before the checkin
        rows = conn.execute("select id, cents from refunds where id > ? limit ?", since, page)
        if not rows:
            return
        while rows:
            yield from rows
            rows = conn.execute("select id, cents from refunds where id > ? limit ?", rows[-1][0], page)
        self.replica.checkin(conn)
