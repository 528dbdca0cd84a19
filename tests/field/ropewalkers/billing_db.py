"""Connection pool and repositories of the billing service (sync, thread per request)."""
from __future__ import annotations

import logging
import threading
import time
from collections import deque
from decimal import Decimal

log = logging.getLogger("billing.db")


class PoolTimeout(Exception):
    pass


class Conn:
    def __init__(self, dsn: str, number: int) -> None:
        self.dsn = dsn
        self.number = number
        self.last_used = time.monotonic()
        self.in_tx = False
        self._rows: list[tuple] = []

    def execute(self, sql: str, *args) -> list[tuple]:
        self.last_used = time.monotonic()
        if sql.startswith("begin"):
            self.in_tx = True
        return list(self._rows)

    def commit(self) -> None:
        self.in_tx = False

    def rollback(self) -> None:
        self.in_tx = False

    def ping(self) -> bool:
        return self.execute("select 1") is not None


class ConnPool:
    """Bounded pool. Every connection that leaves must come back by checkin or discard."""

    def __init__(self, dsn: str, size: int = 8) -> None:
        self.dsn = dsn
        self.size = size
        self._cv = threading.Condition()
        self._idle: deque[Conn] = deque()
        self._made = 0

    def checkout(self, timeout: float = 5.0) -> Conn:
        deadline = time.monotonic() + timeout
        with self._cv:
            while not self._idle:
                if self._made < self.size:
                    self._made += 1
                    return Conn(self.dsn, self._made)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PoolTimeout(self.dsn)
                self._cv.wait(left)
            return self._idle.popleft()

    def try_checkout(self) -> Conn | None:
        with self._cv:
            if self._idle:
                return self._idle.popleft()
            if self._made < self.size:
                self._made += 1
                return Conn(self.dsn, self._made)
            return None

    def checkin(self, conn: Conn) -> None:
        if conn.in_tx:
            conn.rollback()
        with self._cv:
            self._idle.append(conn)
            self._cv.notify()

    def discard(self, conn: Conn) -> None:
        with self._cv:
            self._made -= 1
            self._cv.notify()

    def sweep(self, max_idle: float) -> int:
        """Run by the housekeeping thread: look at each idle connection once."""
        kept = 0
        for _ in range(len(self._idle)):
            conn = self.try_checkout()  # leak: a stale connection is neither discarded nor checked in
            if conn is None:
                break
            if time.monotonic() - conn.last_used > max_idle:
                log.info("connection %d of %s is stale", conn.number, self.dsn)
                continue
            kept += 1
            self.checkin(conn)
        return kept

    def probe(self) -> bool:
        conn = self.try_checkout()  # clean: discarded when dead, checked in when alive
        if conn is None:
            return False
        if not conn.ping():
            self.discard(conn)
            return False
        self.checkin(conn)
        return True


primary = ConnPool("postgres://billing-primary/billing", 12)
replica = ConnPool("postgres://billing-replica/billing", 24)


def pool_for(readonly: bool) -> ConnPool:
    return replica if readonly else primary


def reader(max_lag: float) -> tuple[ConnPool, Conn]:
    """A replica connection when the replica keeps up, a primary one otherwise."""
    conn = replica.checkout()  # clean: returned with its pool, or checked in before falling back
    rows = conn.execute("select now() - pg_last_xact_replay_timestamp()")
    lag = float(rows[0][0]) if rows else 0.0
    if lag > max_lag:
        replica.checkin(conn)
        return primary, primary.checkout()  # clean: handed to the caller
    return replica, conn


class InvoiceRepo:
    def __init__(self, currency: str) -> None:
        self.currency = currency

    def total(self, customer: int) -> Decimal:
        conn = replica.checkout()  # leak: the early return for a customer without invoices keeps it
        rows = conn.execute("select amount from invoice where customer = $1", customer)
        if not rows:
            return Decimal(0)
        total = sum((Decimal(r[0]) for r in rows), Decimal(0))
        replica.checkin(conn)
        return total.quantize(Decimal("0.01"))

    def statement(self, customer: int, fresh: bool) -> list[str]:
        pool = pool_for(not fresh)
        conn = pool.checkout()  # clean: near miss, given back to whichever pool was chosen
        lines = []
        for number, amount in conn.execute("select number, amount from invoice where c = $1", customer):
            if Decimal(amount) == 0:
                continue
            lines.append(f"{number}: {amount} {self.currency}")
        pool.checkin(conn)
        return lines

    def numbers(self, customer: int) -> list[str]:
        _, conn = reader(max_lag=30.0)  # leak: the helper's connection is read and dropped
        return [r[0] for r in conn.execute("select number from invoice where customer = $1", customer)]

    def mark_paid(self, invoice: int, attempts: int = 3) -> bool:
        """Serialisation failures show up as an empty result; try on a new connection then."""
        conn = primary.checkout()  # leak: rebound in the retry loop without a checkin
        for attempt in range(attempts):
            conn.execute("begin isolation level serializable")
            if conn.execute("update invoice set paid = now() where id = $1 returning id", invoice):
                conn.commit()
                primary.checkin(conn)
                return True
            conn.rollback()
            time.sleep(0.05 * attempt)
            conn = primary.checkout()  # leak: overwritten by the next round, dropped after the last
        return False

    def void(self, invoice: int, attempts: int = 3) -> bool:
        for attempt in range(attempts):
            conn = primary.checkout()  # clean: every round gives its own back
            conn.execute("begin isolation level serializable")
            if conn.execute("update invoice set void = true where id = $1 returning id", invoice):
                conn.commit()
                primary.checkin(conn)
                return True
            primary.checkin(conn)
            time.sleep(0.05 * attempt)
        return False

    def copy_month(self, month: str) -> int:
        src = replica.checkout()  # leak: not given back when the primary has no free connection
        dst = primary.try_checkout()  # clean: None-checked and given back
        if dst is None:
            log.warning("no writer for month %s", month)
            return 0
        rows = src.execute("select * from invoice where month = $1", month)
        for row in rows:
            dst.execute("insert into archive values ($1)", row)
        dst.commit()
        primary.checkin(dst)
        replica.checkin(src)
        return len(rows)

    def compare_month(self, month: str) -> int:
        src = replica.checkout()  # clean: rolled back when the second one is not to be had
        dst = primary.try_checkout()  # clean: None-checked
        if dst is None:
            replica.checkin(src)
            return -1
        left = src.execute("select sum(amount) from invoice where month = $1", month)
        right = dst.execute("select sum(amount) from invoice where month = $1", month)
        for pool, conn in ((replica, src), (primary, dst)):
            pool.checkin(conn)
        return 0 if left == right else 1


def monthly_report(customers: list[int], dry_run: bool) -> int:
    repo = InvoiceRepo("EUR")
    conn = None
    if not dry_run:
        conn = primary.checkout()  # clean: near miss, the same flag guards the checkin
        conn.execute("begin")
    written = 0
    for customer in customers:
        amount = repo.total(customer)
        if amount == 0:
            continue
        if conn is not None:
            conn.execute("insert into report values ($1, $2)", customer, amount)
        written += 1
    if not dry_run:
        conn.commit()
        primary.checkin(conn)
    return written
