"""Connection leases under sessions, units of work, cursors and streams."""
from __future__ import annotations

import asyncio
import logging
from typing import AsyncIterator

log = logging.getLogger(__name__)


class Conn:
    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.broken = False

    async def execute(self, sql: str, *args) -> list[tuple]:
        await asyncio.sleep(0)
        return [(sql, *args)]

    async def ping(self) -> bool:
        return not self.broken


class ConnPool:
    def __init__(self, dsn: str, size: int) -> None:
        self.dsn = dsn
        self._idle: asyncio.Queue[Conn] = asyncio.Queue()
        for _ in range(size):
            self._idle.put_nowait(Conn(dsn))

    async def lease(self) -> Conn:
        return await self._idle.get()

    def restore(self, conn: Conn) -> None:
        self._idle.put_nowait(conn)

    def replace(self, conn: Conn) -> None:
        """Throws the broken connection away and refills its place."""
        conn.broken = True
        self._idle.put_nowait(Conn(self.dsn))


class Session:
    def __init__(self, pool: ConnPool) -> None:
        self._pool = pool
        self._conn: Conn | None = None

    async def begin(self) -> None:
        if self._conn is None:
            self._conn = await self._pool.lease()  # clean: near miss, taken once, end() restores it

    async def run(self, sql: str, *args) -> list[tuple]:
        return await self._conn.execute(sql, *args)

    async def end(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            self._pool.restore(conn)


class UnitOfWork:
    def __init__(self, pool: ConnPool, audit_pool: ConnPool) -> None:
        self._main = Session(pool)
        self._audit = Session(audit_pool)

    async def __aenter__(self) -> "UnitOfWork":
        await self._main.begin()  # clean: __aexit__ ends it on both ways
        await self._audit.begin()  # leak: __aexit__ ends only the main session
        return self

    async def save(self, table: str, row: tuple) -> None:
        await self._main.run(f"insert into {table}", *row)
        await self._audit.run("insert into audit", table)

    async def __aexit__(self, exc_type, exc, tb) -> None:
        if exc_type is None:
            await self._main.run("commit")
        else:
            await self._main.run("rollback")
        await self._main.end()


class Cursor:
    def __init__(self, session: Session, sql: str, borrowed: bool) -> None:
        self.session = session
        self.sql = sql
        self.borrowed = borrowed

    async def fetch(self) -> list[tuple]:
        return await self.session.run(self.sql)

    async def close(self) -> None:
        self.sql = ""
        if self.borrowed:
            return
        await self.session.end()


class RowStream:
    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor

    async def rows(self) -> AsyncIterator[tuple]:
        for row in await self._cursor.fetch():
            yield row

    async def aclose(self) -> None:
        await self._cursor.close()


async def open_export(pool: ConnPool, table: str) -> RowStream:
    session = Session(pool)
    await session.begin()  # clean: near miss, the cursor owns the session, aclose() goes all the way down
    return RowStream(Cursor(session, f"select * from {table}", borrowed=False))


async def open_report(pool: ConnPool, table: str, day: str) -> RowStream:
    session = Session(pool)
    await session.begin()  # leak: the cursor only borrows and nobody else keeps the session
    await session.run("set snapshot", day)
    return RowStream(Cursor(session, f"select * from {table}_daily", borrowed=True))


async def compare_counts(pool: ConnPool, left: str, right: str) -> bool:
    session = Session(pool)
    await session.begin()  # clean: near miss, both cursors borrow and the session is ended here
    sizes = []
    for table in (left, right):
        stream = RowStream(Cursor(session, f"select id from {table}", borrowed=True))
        sizes.append(len([row async for row in stream.rows()]))
        await stream.aclose()
    await session.end()
    return sizes[0] == sizes[1]


async def export_rows(pool: ConnPool, table: str, limit: int) -> list[tuple]:
    stream = await open_export(pool, table)  # clean: closed in finally on the early return too
    out: list[tuple] = []
    try:
        async for row in stream.rows():
            out.append(row)
            if len(out) >= limit:
                return out
    finally:
        await stream.aclose()
    return out


class ReadThenWrite:
    """Starts on a replica, goes to the primary at the first write."""

    def __init__(self, primary: ConnPool, replica: ConnPool) -> None:
        self._primary = primary
        self._replica = replica
        self._conn: Conn | None = None
        self._writing = False

    async def begin(self) -> None:
        self._conn = await self._replica.lease()  # leak: write() puts the primary's connection over it

    async def write(self, sql: str, *args) -> None:
        if not self._writing:
            self._conn = await self._primary.lease()  # clean: near miss, _writing makes end() restore it
            self._writing = True
        await self._conn.execute(sql, *args)

    async def end(self) -> None:
        home = self._primary if self._writing else self._replica
        home.restore(self._conn)
        self._conn, self._writing = None, False


class StickyFailover:
    def __init__(self, primary: ConnPool, standby: ConnPool) -> None:
        self._home = primary
        self._standby = standby
        self._conn: Conn | None = None

    async def begin(self) -> None:
        self._conn = await self._home.lease()  # clean: near miss, fail_over() restores it before switching

    async def fail_over(self) -> None:
        self._home.restore(self._conn)
        self._home = self._standby
        self._conn = await self._home.lease()  # clean: near miss, _home names its pool when end() runs

    async def end(self) -> None:
        if self._conn is not None:
            self._home.restore(self._conn)
            self._conn = None


async def discard_if_broken(pool: ConnPool, conn: Conn) -> bool:
    """True when the connection was bad and has been replaced in the pool."""
    if await conn.ping():
        return False
    pool.replace(conn)
    return True


async def probe(pool: ConnPool) -> str:
    conn = await pool.lease()  # leak: the helper replaces only broken ones, a healthy one is not restored
    if await discard_if_broken(pool, conn):
        log.warning("replaced a dead connection to %s", pool.dsn)
        return "replaced"
    await conn.execute("select 1")
    return "ok"


async def warm(pool: ConnPool, rounds: int) -> int:
    healthy = 0
    for _ in range(rounds):
        conn = await pool.lease()  # clean: near miss, the bool says whether the helper took it over
        if not await discard_if_broken(pool, conn):
            healthy += 1
            pool.restore(conn)
    return healthy


async def record_order(pool: ConnPool, audit_pool: ConnPool, row: tuple) -> None:
    async with UnitOfWork(pool, audit_pool) as uow:  # clean: left through the context manager
        await uow.save("orders", row)
