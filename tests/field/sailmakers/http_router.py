"""Async router in front of the engine replicas: per-replica permits, HTTP sessions, hedging, SSE relay."""
from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
from typing import Any, AsyncIterator, Dict, List, Optional

log = logging.getLogger("router")


class ReplicaDown(Exception):
    pass


class Overloaded(Exception):
    pass


class Permits:
    """Counted permits with a nonblocking and a waiting entry."""

    def __init__(self, n: int):
        self.n = n
        self.out = 0
        self._waiters: "asyncio.Queue[asyncio.Future]" = asyncio.Queue()

    def try_enter(self) -> bool:
        if self.out >= self.n:
            return False
        self.out += 1
        return True

    async def enter(self) -> None:
        if self.try_enter():  # clean: held for the caller, given up with leave()
            return
        fut = asyncio.get_running_loop().create_future()
        self._waiters.put_nowait(fut)
        try:
            await fut
        except asyncio.CancelledError:
            if fut.done() and not fut.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        while not self._waiters.empty():
            fut = self._waiters.get_nowait()
            if not fut.done():
                fut.set_result(None)
                return
        self.out -= 1

    @contextlib.asynccontextmanager
    async def inside(self):
        await self.enter()  # clean: left in finally
        try:
            yield
        finally:
            self.leave()


class ConnPool:
    def __init__(self, host: str, port: int, keep: int = 16):
        self.host, self.port, self.keep = host, port, keep
        self.idle: List[Any] = []

    async def dial(self):
        while self.idle:
            conn = self.idle.pop()  # clean: near miss, a stale one is closed before the next pop
            if conn.fresh():
                return conn
            conn.close()
        reader, writer = await asyncio.open_connection(self.host, self.port)  # clean: handed over inside Conn
        return Conn(reader, writer)

    def hang_up(self, conn, reuse: bool = True) -> None:
        if reuse and len(self.idle) < self.keep:
            self.idle.append(conn)
        else:
            conn.close()


class Conn:
    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.born = time.monotonic()

    def fresh(self) -> bool:
        return not self.reader.at_eof() and time.monotonic() - self.born < 300

    def close(self) -> None:
        self.writer.close()

    async def request(self, path: str, body: Dict[str, Any]) -> Dict[str, Any]:
        raw = json.dumps(body).encode()
        self.writer.write(b"POST %s HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(raw)) + raw)
        await self.writer.drain()
        head = await self.reader.readuntil(b"\r\n\r\n")
        if b" 503 " in head.split(b"\r\n", 1)[0]:
            raise ReplicaDown(head)
        line = await self.reader.readline()
        return json.loads(line)

    async def lines(self) -> AsyncIterator[bytes]:
        while True:
            line = await self.reader.readline()
            if not line:
                return
            yield line


class Replica:
    def __init__(self, name: str, host: str, port: int, permits: int):
        self.name = name
        self.permits = Permits(permits)
        self.conns = ConnPool(host, port)
        self.down_until = 0.0

    @property
    def up(self) -> bool:
        return time.monotonic() >= self.down_until


class Router:
    def __init__(self, replicas: List[Replica]):
        self.replicas = replicas
        self.sticky: Dict[str, Replica] = {}
        self.streams: Dict[str, tuple] = {}

    def _order(self, key: Optional[str]) -> List[Replica]:
        out = sorted(self.replicas, key=lambda r: (r.permits.out / r.permits.n, random.random()))
        if key in self.sticky:
            out.sort(key=lambda r: r is not self.sticky[key])
        return out

    def _reserve(self, key: Optional[str]) -> Optional[Replica]:
        for r in self._order(key):
            if not r.permits.try_enter():  # leak: a replica that is down is skipped with its permit taken
                continue
            if not r.up:
                continue
            return r
        return None

    async def complete(self, body: Dict[str, Any]) -> Dict[str, Any]:
        r = self._reserve(body.get("user"))  # clean: left in finally
        if r is None:
            raise Overloaded()
        try:
            conn = await r.conns.dial()  # clean: near miss, reuse flag tells hang_up() whether to keep or close
            ok = False
            try:
                out = await conn.request("/v1/completions", body)
                ok = True
                return out
            finally:
                r.conns.hang_up(conn, reuse=ok)
        finally:
            r.permits.leave()

    async def complete_retry(self, body: Dict[str, Any], attempts: int = 3) -> Dict[str, Any]:
        for i in range(attempts):
            r = self._reserve(None)  # leak: ReplicaDown goes to the next attempt without leave()
            if r is None:
                await asyncio.sleep(0.05 * (i + 1))
                continue
            try:
                conn = await r.conns.dial()  # leak: not hung up when request() raises ReplicaDown
                out = await conn.request("/v1/completions", body)
            except ReplicaDown:
                r.down_until = time.monotonic() + 5
                continue
            r.conns.hang_up(conn)
            r.permits.leave()
            return out
        raise Overloaded()

    async def health(self) -> Dict[str, bool]:
        res = {}
        for r in self.replicas:
            async with r.permits.inside():  # clean: context manager
                conn = await r.conns.dial()  # clean: near miss, closed in except and hung up in else
                try:
                    await conn.request("/health", {})
                except (Exception, asyncio.CancelledError):
                    conn.close()
                    res[r.name] = False
                else:
                    r.conns.hang_up(conn)
                    res[r.name] = True
        return res

    async def relay_limited(self, body: Dict[str, Any], max_lines: int) -> AsyncIterator[bytes]:
        r = self._reserve(None)  # clean: left in finally
        if r is None:
            raise Overloaded()
        try:
            conn = await r.conns.dial()  # leak: not hung up when max_lines is reached
            await conn.request("/v1/completions", dict(body, stream=True))
            n = 0
            async for line in conn.lines():
                yield line
                n += 1
                if n >= max_lines:
                    return
            r.conns.hang_up(conn, reuse=False)
        finally:
            r.permits.leave()

    async def open_stream(self, sid: str, body: Dict[str, Any]) -> bool:
        if sid in self.streams:
            return False
        r = self._reserve(body.get("user"))  # clean: left when dial() fails, else kept in self.streams
        if r is None:
            return False
        try:
            conn = await r.conns.dial()  # clean: near miss, moved to self.streams, which close_stream() empties
        except OSError:
            r.permits.leave()
            return False
        except asyncio.CancelledError:
            r.permits.leave()
            raise
        self.streams[sid] = (r, conn)
        return True

    async def close_stream(self, sid: str) -> None:
        ent = self.streams.pop(sid, None)
        if ent is None:
            return
        r, conn = ent
        conn.close()
        r.permits.leave()

    async def hedge(self, body: Dict[str, Any], after: float) -> Dict[str, Any]:
        first = asyncio.ensure_future(self.complete(body))
        done, _ = await asyncio.wait({first}, timeout=after)
        if done:
            return first.result()
        second = asyncio.ensure_future(self.complete(body))
        done, rest = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        for t in rest:
            t.cancel()
        return done.pop().result()

    def pin_user(self, user: str, limit: int) -> Optional[Replica]:
        """Long sessions keep one permit; unpin_user() gives it up."""
        r = self._reserve(user)  # leak: the permit is kept when the table is full
        if r is None:
            return None
        if len(self.sticky) >= limit and user not in self.sticky:
            return None
        old = self.sticky.get(user)
        if old is not None:
            old.permits.leave()
        self.sticky[user] = r
        return r

    def unpin_user(self, user: str) -> None:
        r = self.sticky.pop(user, None)
        if r is not None:
            r.permits.leave()
