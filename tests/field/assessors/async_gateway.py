"""Async gateway in front of several inference replicas."""
from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Optional


class Permits:
    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._cond = asyncio.Condition()

    def try_take(self) -> bool:
        if self.used >= self.total:
            return False
        self.used += 1
        return True

    async def take(self) -> None:
        async with self._cond:
            await self._cond.wait_for(lambda: self.used < self.total)
            self.used += 1

    async def put(self) -> None:
        async with self._cond:
            self.used -= 1
            self._cond.notify()


@dataclass(eq=False)
class Connection:
    host: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    broken: bool = False

    async def call(self, payload: bytes) -> Optional[bytes]:
        self.writer.write(len(payload).to_bytes(4, "big") + payload)
        await self.writer.drain()
        head = await self.reader.readexactly(4)
        size = int.from_bytes(head, "big")
        return await self.reader.readexactly(size) if size else None


class ConnectionPool:
    def __init__(self, per_host: int) -> None:
        self.per_host = per_host
        self._idle: dict[str, list[Connection]] = defaultdict(list)
        self._count: dict[str, int] = defaultdict(int)

    async def checkout(self, host: str) -> Optional[Connection]:
        if self._idle[host]:
            return self._idle[host].pop()
        if self._count[host] >= self.per_host:
            return None
        self._count[host] += 1
        name, port = host.split(":")
        try:
            reader, writer = await asyncio.open_connection(name, int(port))  # clean: owned by the Connection that is returned
        except OSError:
            self._count[host] -= 1
            return None
        return Connection(host, reader, writer)

    def checkin(self, conn: Connection) -> None:
        if conn.broken:
            conn.writer.close()
            self._count[conn.host] -= 1
            return
        self._idle[conn.host].append(conn)

    def close(self) -> None:
        for conns in self._idle.values():
            for c in conns:
                c.writer.close()
        self._idle.clear()


@dataclass
class Session:
    sid: str
    conn: Connection
    opened: float = field(default_factory=time.monotonic)
    turns: int = 0


class Gateway:
    def __init__(self, hosts: list[str], pool: ConnectionPool, permits: Permits) -> None:
        self.hosts = hosts
        self.pool = pool
        self.permits = permits
        self._sessions: dict[str, Session] = {}
        self._rr = 0

    def _next_host(self) -> str:
        self._rr = (self._rr + 1) % len(self.hosts)
        return self.hosts[self._rr]

    async def generate(self, payload: bytes) -> Optional[bytes]:
        await self.permits.take()  # clean: put in the finally clause
        try:
            conn = await self.pool.checkout(self._next_host())  # clean: near miss, the handler for a cut connection marks it and the finally checks it in
            if conn is None:
                return None
            try:
                return await conn.call(payload)
            except (asyncio.IncompleteReadError, asyncio.CancelledError):
                conn.broken = True
                raise
            finally:
                self.pool.checkin(conn)
        finally:
            await self.permits.put()

    async def generate_nowait(self, payload: bytes) -> Optional[bytes]:
        if not self.permits.try_take():  # leak: no connection means a return without putting the permit
            return None
        conn = await self.pool.checkout(self._next_host())  # clean: near miss, checked in by the finally clause below
        if conn is None:
            return None
        try:
            return await conn.call(payload)
        finally:
            self.pool.checkin(conn)
            await self.permits.put()

    async def generate_retry(self, payload: bytes, attempts: int = 3) -> Optional[bytes]:
        for _ in range(attempts):
            conn = await self.pool.checkout(self._next_host())  # leak: after a cut read the next attempt starts and the broken connection is not checked in
            if conn is None:
                continue
            try:
                out = await conn.call(payload)
            except asyncio.IncompleteReadError:
                conn.broken = True
                continue
            self.pool.checkin(conn)
            return out
        return None

    async def open_session(self, sid: str) -> bool:
        conn = await self.pool.checkout(self._next_host())  # leak: a session id that is open already returns with the new connection dropped
        if conn is None:
            return False
        if sid in self._sessions:
            return True
        self._sessions[sid] = Session(sid, conn)
        return True

    async def turn(self, sid: str, payload: bytes) -> Optional[bytes]:
        sess = self._sessions.get(sid)
        if sess is None:
            return None
        await self.permits.take()  # leak: an answer that times out is handled by a return before the put
        try:
            out = await asyncio.wait_for(sess.conn.call(payload), 60.0)
        except asyncio.TimeoutError:
            sess.conn.broken = True
            return None
        sess.turns += 1
        await self.permits.put()
        return out

    def close_session(self, sid: str) -> None:
        sess = self._sessions.pop(sid, None)
        if sess is not None:
            self.pool.checkin(sess.conn)

    def expire(self, max_age: float) -> int:
        now = time.monotonic()
        old = [s.sid for s in self._sessions.values() if now - s.opened > max_age]
        for sid in old:
            self.close_session(sid)
        return len(old)

    async def fan_out(self, payload: bytes) -> list[Optional[bytes]]:
        conns: list[Connection] = []
        for host in self.hosts:
            conn = await self.pool.checkout(host)  # clean: near miss, hosts without a connection are skipped and all others checked in below
            if conn is None:
                continue
            conns.append(conn)
        results = await asyncio.gather(*(c.call(payload) for c in conns), return_exceptions=True)
        out: list[Optional[bytes]] = []
        for conn, res in zip(conns, results):
            conn.broken = isinstance(res, BaseException)
            self.pool.checkin(conn)
            out.append(None if isinstance(res, BaseException) else res)
        return out

    @asynccontextmanager
    async def pinned(self, host: str) -> AsyncIterator[Optional[Connection]]:
        conn = await self.pool.checkout(host)  # clean: checked in after the body
        try:
            yield conn
        finally:
            if conn is not None:
                self.pool.checkin(conn)

    async def healthy(self) -> list[str]:
        good: list[str] = []
        for host in self.hosts:
            async with self.pinned(host) as conn:  # clean: near miss, continue within the body leaves through the context manager
                if conn is None:
                    continue
                if await conn.call(b"ping") == b"pong":
                    good.append(host)
        return good
