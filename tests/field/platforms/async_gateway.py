"""Async front end: upstream connections, admission tickets and streaming sessions."""
from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import AsyncIterator, Deque, Dict, List, Optional


@dataclass(eq=False)
class Connection:
    host: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def request(self, body: bytes) -> bytes:
        self.writer.write(body)
        await self.writer.drain()
        return await self.reader.readline()


class ConnectionPool:
    """Keeps idle upstream connections and bounds how many are lent."""

    def __init__(self, host: str, port: int, limit: int) -> None:
        self.host = host
        self.port = port
        self._idle: Deque[Connection] = deque()
        self._limit = asyncio.Semaphore(limit)

    async def acquire(self) -> Connection:
        await self._limit.acquire()  # clean: released when the connection comes back
        if self._idle:
            return self._idle.pop()  # clean: returned to the caller
        reader, writer = await asyncio.open_connection(self.host, self.port)  # clean: wrapped in the connection returned
        return Connection(self.host, reader, writer)

    def release(self, conn: Connection) -> None:
        self._idle.append(conn)
        self._limit.release()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        conn = await self.acquire()  # clean: released in the finally
        try:
            yield conn
        finally:
            self.release(conn)


class TicketOffice:
    """Admission tickets; a plain counter because the loop is single threaded."""

    def __init__(self, tickets: int) -> None:
        self._tickets = tickets

    def try_take(self) -> bool:
        if self._tickets == 0:
            return False
        self._tickets -= 1  # clean: taken on behalf of the caller
        return True

    def put_back(self) -> None:
        self._tickets += 1


class Gateway:
    def __init__(self, pool: ConnectionPool, office: TicketOffice) -> None:
        self.pool = pool
        self.office = office
        self.sessions: Dict[str, Connection] = {}
        self.tasks: List["asyncio.Task[bytes]"] = []

    async def complete(self, body: bytes) -> Optional[bytes]:
        conn = await self.pool.acquire()  # leak: an empty reply returns before the release
        reply = await conn.request(body)
        if not reply:
            return None
        self.pool.release(conn)
        return reply

    async def embed(self, body: bytes) -> Optional[bytes]:
        if not self.office.try_take():  # clean: near miss, put back on both ways out
            return None
        async with self.pool.connection() as conn:  # clean: the async with releases it
            reply = await conn.request(body)
        if not reply:
            self.office.put_back()
            return None
        self.office.put_back()
        return reply

    async def complete_with_retry(self, body: bytes, attempts: int) -> Optional[bytes]:
        for attempt in range(attempts):
            conn = await self.pool.acquire()  # leak: the timeout handler sleeps and loops without a release
            try:
                reply = await asyncio.wait_for(conn.request(body), timeout=30.0)
            except asyncio.TimeoutError:
                await asyncio.sleep(0.1 * 2**attempt)
                continue
            self.pool.release(conn)
            return reply
        return None

    async def hedge(self, body: bytes) -> bytes:
        """Ask two upstreams and use the quicker reply."""
        first = await self.pool.acquire()  # leak: not released when the second one answers first
        second = await self.pool.acquire()  # leak: not released when the first one answers first
        asked = {
            asyncio.create_task(first.request(body)): first,
            asyncio.create_task(second.request(body)): second,
        }
        done, pending = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        winner = done.pop()
        self.pool.release(asked[winner])
        return winner.result()

    async def broadcast(self, body: bytes, width: int) -> List[bytes]:
        conns: List[Connection] = []
        for _ in range(width):
            conns.append(await self.pool.acquire())  # clean: near miss, every one in the list is released in the finally
        try:
            return list(await asyncio.gather(*(conn.request(body) for conn in conns)))
        finally:
            for conn in conns:
                self.pool.release(conn)

    def spawn(self, body: bytes) -> bool:
        if not self.office.try_take():  # clean: near miss, the task's done callback puts it back
            return False
        task = asyncio.get_running_loop().create_task(self._serve(body))
        task.add_done_callback(lambda _t: self.office.put_back())
        self.tasks.append(task)
        return True

    def spawn_many(self, bodies: List[bytes]) -> int:
        started = 0
        for body in bodies:
            if not self.office.try_take():  # leak: an empty body is skipped with its ticket kept
                break
            if not body.strip():
                continue
            task = asyncio.get_running_loop().create_task(self._serve(body))
            task.add_done_callback(lambda _t: self.office.put_back())
            started += 1
        return started

    async def _serve(self, body: bytes) -> bytes:
        conn = await self.pool.acquire()  # clean: released in the finally
        try:
            return await conn.request(body)
        finally:
            self.pool.release(conn)

    async def open_session(self, session_id: str) -> None:
        conn = await self.pool.acquire()  # clean: near miss, released if the session exists by now, else close_session does
        if session_id in self.sessions:
            self.pool.release(conn)
            return
        self.sessions[session_id] = conn

    async def reopen_session(self, session_id: str) -> None:
        fresh = await self.pool.acquire()  # clean: near miss, the old one is popped before the store and released after
        old = self.sessions.pop(session_id, None)
        self.sessions[session_id] = fresh
        if old is not None:
            self.pool.release(old)

    def close_session(self, session_id: str) -> None:
        conn = self.sessions.pop(session_id, None)
        if conn is not None:
            self.pool.release(conn)

    async def shutdown(self) -> None:
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for session_id in list(self.sessions):
            self.close_session(session_id)
