"""An asyncio parameter server: connections, row locks, update permits."""
from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Optional

log = logging.getLogger("ps")


@dataclass(eq=False)
class Conn:
    host: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def call(self, op: bytes, body: bytes = b"") -> bytes:
        self.writer.write(op + len(body).to_bytes(4, "little") + body)
        await self.writer.drain()
        size = int.from_bytes(await self.reader.readexactly(4), "little")
        return await self.reader.readexactly(size)


class ConnPool:
    """Keeps idle connections by host; at most `limit` are lent at a time."""

    def __init__(self, limit: int, port: int = 7711) -> None:
        self._permits = asyncio.Semaphore(limit)
        self._idle: dict[str, list[Conn]] = defaultdict(list)
        self._port = port

    async def get(self, host: str) -> Conn:
        await self._permits.acquire()  # clean: near miss, goes with the connection, put releases it
        if self._idle[host]:
            return self._idle[host].pop()
        reader, writer = await asyncio.open_connection(host, self._port)
        return Conn(host, reader, writer)

    async def get_idle(self, host: str) -> Optional[Conn]:
        """Only an idle connection, never a new one."""
        await self._permits.acquire()  # leak: without an idle connection None goes out and the permit stays taken
        idle = self._idle[host]
        if not idle:
            return None
        return idle.pop()

    def put(self, conn: Conn) -> None:
        if not conn.writer.is_closing():
            self._idle[conn.host].append(conn)
        self._permits.release()

    @asynccontextmanager
    async def lent(self, host: str) -> AsyncIterator[Conn]:
        conn = await self.get(host)  # clean: put back in the finally
        try:
            yield conn
        finally:
            self.put(conn)


class RowLocks:
    """A lock for each row which is in use; rows nobody waits for have none."""

    def __init__(self) -> None:
        self._locks: dict[int, asyncio.Lock] = {}
        self._users: dict[int, int] = defaultdict(int)

    async def lock_row(self, row: int) -> None:
        lock = self._locks.setdefault(row, asyncio.Lock())
        self._users[row] += 1
        await lock.acquire()  # clean: near miss, unlock_row releases it

    def unlock_row(self, row: int) -> None:
        self._locks[row].release()
        self._users[row] -= 1
        if self._users[row] == 0:
            del self._users[row], self._locks[row]


async def pull(pool: ConnPool, host: str, rows: list[int]) -> dict[int, bytes]:
    out = {}
    async with pool.lent(host) as conn:  # clean: put back by the context manager
        for row in rows:
            out[row] = await conn.call(b"PULL", row.to_bytes(8, "little"))
    return out


async def push(pool: ConnPool, host: str, row: int, grad: bytes) -> bool:
    conn = await pool.get(host)  # leak: a refused update returns without put
    answer = await conn.call(b"PUSH", row.to_bytes(8, "little") + grad)
    if answer == b"STALE":
        log.info("row %d: update refused", row)
        return False
    pool.put(conn)
    return True


async def push_with_retry(pool: ConnPool, hosts: list[str], row: int, grad: bytes) -> Optional[str]:
    for host in hosts:
        conn = await pool.get(host)  # clean: near miss, put back in the finally before the next host
        try:
            if await conn.call(b"PUSH", row.to_bytes(8, "little") + grad) == b"OK":
                return host
        except ConnectionError:
            conn.writer.close()
        finally:
            pool.put(conn)
        await asyncio.sleep(0.1)
    return None


async def warm_up(pool: ConnPool, hosts: list[str]) -> int:
    """Opens a connection to every host."""
    conns = await asyncio.gather(*(pool.get(h) for h in hosts))  # clean: all are put back in the loop
    for conn in conns:
        pool.put(conn)
    return len(conns)


async def versions(pool: ConnPool, hosts: list[str]) -> dict[str, int]:
    conns = await asyncio.gather(*(pool.get(h) for h in hosts))  # leak: connections are used and then dropped with the list
    answers = await asyncio.gather(*(c.call(b"VERS") for c in conns))
    return {c.host: int.from_bytes(a, "little") for c, a in zip(conns, answers)}


async def add_rows(locks: RowLocks, table: dict[int, Any], updates: dict[int, Any]) -> int:
    applied = 0
    for row, delta in updates.items():
        await locks.lock_row(row)  # leak: an unknown row is passed over while locked
        if row not in table:
            log.debug("row %d is not on this server", row)
            continue
        table[row] = table[row] + delta
        locks.unlock_row(row)
        applied += 1
    return applied


@dataclass
class Request:
    client: str
    row: int
    grad: Any = None
    conn: Optional[Conn] = None
    answer: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class UpdateQueue:
    """Requests carry their upstream connection; finish or cancel ends a request."""

    def __init__(self, pool: ConnPool, upstream: str) -> None:
        self._pool, self._upstream = pool, upstream
        self._open: dict[str, Request] = {}

    async def admit(self, req: Request) -> None:
        req.conn = await self._pool.get(self._upstream)  # leak: cancel drops the request without putting it back
        self._open[req.client] = req

    async def finish(self, client: str) -> None:
        req = self._open.pop(client)
        req.answer.set_result(await req.conn.call(b"DONE"))
        self._pool.put(req.conn)
        req.conn = None

    def cancel(self, client: str) -> None:
        req = self._open.pop(client, None)
        if req is not None:
            req.answer.cancel()


class PrefetchQueue:
    def __init__(self, pool: ConnPool, permits: asyncio.Semaphore) -> None:
        self._pool, self._permits = pool, permits
        self._tasks: dict[int, asyncio.Task] = {}

    async def start(self, host: str, row: int) -> None:
        await self._permits.acquire()  # clean: near miss, the task's done callback releases it
        task = asyncio.create_task(pull(self._pool, host, [row]))
        task.add_done_callback(lambda _t: self._permits.release())
        self._tasks[row] = task

    async def start_if_idle(self, host: str, row: int) -> bool:
        if self._permits.locked():
            return False
        await self._permits.acquire()  # leak: a row that is on its way already returns with the permit
        if row in self._tasks:
            return True
        task = asyncio.create_task(pull(self._pool, host, [row]))
        task.add_done_callback(lambda _t: self._permits.release())
        self._tasks[row] = task
        return True

    async def take(self, row: int) -> bytes:
        task = self._tasks.pop(row)
        return (await task)[row]
