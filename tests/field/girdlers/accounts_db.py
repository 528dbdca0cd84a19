"""Storage layer of the account service: an asyncio connection pool and the repositories built on it."""
from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, AsyncIterator, Optional

log = logging.getLogger("accounts.db")


class Conn:
    """One server connection; the wire protocol lives in _roundtrip."""

    def __init__(self, number: int, dsn: str) -> None:
        self.number = number
        self.dsn = dsn
        self.opened_at = time.monotonic()
        self.in_tx = False
        self.read_only = False

    async def _roundtrip(self, sql: str, args: tuple) -> list[dict[str, Any]]:
        await asyncio.sleep(0)
        log.debug("conn %d: %s %r", self.number, sql, args)
        return []

    async def fetch(self, sql: str, *args: Any) -> list[dict[str, Any]]:
        return await self._roundtrip(sql, args)

    async def execute(self, sql: str, *args: Any) -> int:
        return len(await self._roundtrip(sql, args))

    async def ping(self) -> bool:
        return (await self._roundtrip("select 1", ())) is not None

    def age(self) -> float:
        return time.monotonic() - self.opened_at


class ConnPool:
    def __init__(self, dsn: str, size: int) -> None:
        self.dsn = dsn
        self.size = size
        self._idle: deque[Conn] = deque(Conn(i, dsn) for i in range(size))
        self._busy: set[Conn] = set()
        self._cond = asyncio.Condition()

    async def checkout(self) -> Conn:
        async with self._cond:
            while not self._idle:
                await self._cond.wait()
            conn = self._idle.popleft()
            self._busy.add(conn)
            return conn

    async def try_checkout(self) -> Optional[Conn]:
        async with self._cond:
            if not self._idle:
                return None
            conn = self._idle.popleft()
            self._busy.add(conn)
            return conn

    async def checkin(self, conn: Conn) -> None:
        async with self._cond:
            self._busy.discard(conn)
            self._idle.append(conn)
            self._cond.notify()

    async def replace(self, conn: Conn) -> None:
        """Gives a broken connection back: a fresh one takes its place in the idle list."""
        async with self._cond:
            self._busy.discard(conn)
            self._idle.append(Conn(conn.number, self.dsn))
            self._cond.notify()

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Conn]:
        conn = await self.checkout()  # clean: given back in the finally of the context manager
        try:
            yield conn
        finally:
            await self.checkin(conn)

    async def checkout_fresh(self, max_age: float) -> Conn:
        """A connection not older than max_age; older ones are swapped for new ones."""
        while True:
            conn = await self.checkout()  # clean: handed to the caller when young, replaced when old
            if conn.age() <= max_age:
                return conn
            await self.replace(conn)

    async def checkout_live(self, attempts: int = 3) -> Optional[Conn]:
        for attempt in range(attempts):
            conn = await self.checkout()  # leak: a connection that fails the ping is overwritten by the next
            if await conn.ping():
                return conn
            log.info("conn %d does not answer (attempt %d)", conn.number, attempt)
            await asyncio.sleep(0.05 * (attempt + 1))
        return None

    async def warm_up(self) -> int:
        """Pings every idle connection once at start."""
        held: list[Conn] = []
        alive = 0
        for _ in range(self.size):
            conn = await self.try_checkout()  # clean: collected in held and given back below
            if conn is None:
                break
            held.append(conn)
            if await conn.ping():
                alive += 1
        for conn in held:
            await self.checkin(conn)
        return alive


@dataclass
class Account:
    id: int
    email: str
    balance: int
    frozen: bool = False


def _account(row: dict[str, Any]) -> Account:
    return Account(row["id"], row["email"], row["balance"], bool(row.get("frozen")))


class AccountRepo:
    def __init__(self, primary: ConnPool, replica: ConnPool) -> None:
        self.primary = primary
        self.replica = replica

    async def by_email(self, email: str) -> Optional[Account]:
        email = email.strip().lower()
        conn = await self.replica.checkout()  # leak: the return for an unknown address skips checkin
        rows = await conn.fetch("select * from account where email = $1", email)
        if not rows:
            log.info("no account for %s", email)
            return None
        account = _account(rows[0])
        await self.replica.checkin(conn)
        return account

    async def transfer(self, src: int, dst: int, amount: int) -> bool:
        conn = await self.primary.checkout()  # leak: not given back when no audit connection is free
        audit = await self.primary.try_checkout()  # clean: None-checked, given back at the end
        if audit is None:
            log.warning("no audit connection, transfer %d -> %d postponed", src, dst)
            return False
        try:
            moved = await conn.execute("update account set balance = balance - $1 where id = $2", amount, src)
            if moved:
                await conn.execute("update account set balance = balance + $1 where id = $2", amount, dst)
                await audit.execute("insert into audit values ($1, $2, $3)", src, dst, amount)
            return bool(moved)
        finally:
            await self.primary.checkin(conn)
            await self.primary.checkin(audit)

    async def copy_to_archive(self, archive: ConnPool, account_id: int) -> bool:
        source = await self.replica.checkout()  # clean: given back both on refusal and at the end
        target = await archive.try_checkout()  # clean: None-checked, given back at the end
        if target is None:
            await self.replica.checkin(source)
            return False
        rows = await source.fetch("select * from entry where account = $1", account_id)
        for row in rows:
            await target.execute("insert into entry_archive values ($1)", row)
        await archive.checkin(target)
        await self.replica.checkin(source)
        return True

    async def freeze_many(self, ids: list[int]) -> int:
        frozen = 0
        for account_id in ids:
            conn = await self.primary.checkout()  # leak: continue for a missing account skips checkin
            rows = await conn.fetch("select frozen from account where id = $1 for update", account_id)
            if not rows:
                continue
            if not rows[0]["frozen"]:
                frozen += await conn.execute("update account set frozen = true where id = $1", account_id)
            await self.primary.checkin(conn)
        return frozen

    async def stream_ids(self) -> AsyncIterator[int]:
        conn = await self.replica.checkout()  # clean: the generator's finally gives it back
        try:
            for row in await conn.fetch("select id from account order by id"):
                yield row["id"]
        finally:
            await self.replica.checkin(conn)

    async def total(self) -> int:
        async with self.replica.connection() as conn:  # clean: context manager
            rows = await conn.fetch("select sum(balance) as s from account")
            if not rows:
                return 0
            return rows[0]["s"]


class UnitOfWork:
    """A transaction bound to one connection between begin() and commit() or rollback()."""

    def __init__(self, pool: ConnPool) -> None:
        self.pool = pool
        self.conn: Optional[Conn] = None
        self.statements = 0

    async def begin(self) -> None:
        if self.conn is not None:
            return
        self.conn = await self.pool.checkout()  # clean: near miss, commit and rollback both go through _end
        await self.conn.execute("begin")
        self.conn.in_tx = True

    async def run(self, sql: str, *args: Any) -> int:
        assert self.conn is not None
        self.statements += 1
        return await self.conn.execute(sql, *args)

    async def _end(self, word: str) -> None:
        conn, self.conn = self.conn, None
        if conn is None:
            return
        await conn.execute(word)
        conn.in_tx = False
        await self.pool.checkin(conn)

    async def commit(self) -> None:
        await self._end("commit")

    async def rollback(self) -> None:
        await self._end("rollback")


async def nightly_interest(pool: ConnPool, rate: float) -> int:
    conn = await pool.checkout_fresh(600.0)  # leak: the connection is never given back after the update
    changed = await conn.execute("update account set balance = balance * $1", 1.0 + rate)
    log.info("interest booked on %d accounts", changed)
    return changed


async def health(pool: ConnPool) -> dict[str, Any]:
    started = time.monotonic()
    conn = await pool.checkout_live()  # clean: None-checked and given back
    if conn is None:
        return {"ok": False, "took": time.monotonic() - started}
    await pool.checkin(conn)
    return {"ok": True, "took": time.monotonic() - started}
