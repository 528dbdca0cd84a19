"""Asyncio client for a fleet of embedding backends.

One TCP connection carries one request at a time, so the client keeps a bounded pool.
"""
import asyncio
import contextlib
import json
import logging
import random
import time
from collections import deque
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

HELLO = b"EMB/1 hello\n"


class PoolTimeout(Exception):
    pass


class BackendDown(Exception):
    pass


class HandshakeError(Exception):
    pass


class BackendBusy(Exception):
    pass


@dataclass
class Conn:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    born: float = field(default_factory=time.monotonic)
    calls: int = 0

    @classmethod
    async def dial(cls, host, port):
        reader, writer = await asyncio.open_connection(host, port)  # leak: HandshakeError leaves the socket open
        writer.write(HELLO)
        await writer.drain()
        banner = await reader.readline()
        if not banner.startswith(b"EMB/"):
            raise HandshakeError(f"{host}:{port} answered {banner[:40]!r}")
        return cls(reader, writer)

    def fresh(self, max_age):
        return not self.writer.is_closing() and time.monotonic() - self.born < max_age

    def close(self):
        self.writer.close()


class ConnPool:
    def __init__(self, host, port, size=8, max_age=300.0):
        self.host, self.port = host, port
        self.max_age = max_age
        self._idle = deque()
        self._permits = asyncio.Semaphore(size)
        self.dialled = 0

    async def acquire(self, timeout=5.0):
        try:
            await asyncio.wait_for(self._permits.acquire(), timeout)  # leak: when the dial fails with OSError the permit stays taken
        except asyncio.TimeoutError:
            raise PoolTimeout(f"no connection within {timeout}s") from None
        while self._idle:
            conn = self._idle.pop()  # clean: near miss, a stale one is closed and its permit serves the next
            if conn.fresh(self.max_age):
                return conn
            conn.close()
        try:
            conn = await Conn.dial(self.host, self.port)  # clean: handed to the caller
        except OSError as exc:
            raise BackendDown(str(exc)) from exc
        self.dialled += 1
        return conn

    def release(self, conn):
        conn.calls += 1
        self._idle.append(conn)
        self._permits.release()

    def discard(self, conn):
        conn.close()
        self._permits.release()

    @contextlib.asynccontextmanager
    async def lease(self):
        conn = await self.acquire()  # clean: released or discarded on both ways out
        try:
            yield conn
        except BaseException:
            self.discard(conn)
            raise
        self.release(conn)

    def close(self):
        while self._idle:
            conn = self._idle.popleft()  # clean: closed on the next line
            conn.close()


class StreamSession:
    """Pushes many small batches over one connection and commits at the end."""

    def __init__(self, pool, conn, index):
        self.pool, self.conn, self.index = pool, conn, index
        self.sent = 0

    async def push(self, rows):
        self.conn.writer.write(json.dumps({"index": self.index, "rows": rows}).encode() + b"\n")
        await self.conn.writer.drain()
        self.sent += len(rows)

    async def close(self):
        if not self.sent:
            logger.debug("nothing was sent to %s, no commit", self.index)
            return
        self.conn.writer.write(b'{"commit": true}\n')
        await self.conn.writer.drain()
        await self.conn.reader.readline()
        self.pool.release(self.conn)


class EmbedClient:
    def __init__(self, pool, retries=4, hedge_after=0.15):
        self.pool = pool
        self.retries = retries
        self.hedge_after = hedge_after
        self._control = None
        self._tasks = set()

    async def start(self):
        if self._control is None:
            self._control = await self.pool.acquire()  # clean: near miss, kept until stop()
        await self._warm(2)

    async def stop(self):
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._control is not None:
            self.pool.discard(self._control)
            self._control = None
        self.pool.close()

    async def _warm(self, n):
        taken = []
        try:
            for _ in range(n):
                taken.append(await self.pool.acquire(timeout=1.0))  # clean: near miss, the finally empties the list whatever was reached
        except (PoolTimeout, BackendDown) as exc:
            logger.info("warmup stopped at %d: %s", len(taken), exc)
        finally:
            for conn in taken:
                self.pool.release(conn)

    async def _roundtrip(self, conn, payload):
        conn.writer.write(json.dumps(payload).encode() + b"\n")
        await conn.writer.drain()
        line = await conn.reader.readline()
        if not line:
            raise ConnectionResetError("backend closed the connection")
        reply = json.loads(line)
        if reply.get("status") == "busy":
            raise BackendBusy(reply.get("retry_after", 0.1))
        return reply["vectors"]

    async def embed(self, texts):
        conn = await self.pool.acquire()  # clean: every way out of the try releases or discards
        ok = False
        try:
            vectors = await self._roundtrip(conn, {"texts": texts})
            ok = True
            return vectors
        finally:
            if ok:
                self.pool.release(conn)
            else:
                self.pool.discard(conn)

    async def embed_retrying(self, texts):
        for attempt in range(self.retries):
            conn = await self.pool.acquire()  # leak: on BackendBusy the loop takes another one and this is never released
            try:
                vectors = await self._roundtrip(conn, {"texts": texts, "attempt": attempt})
            except BackendBusy as exc:
                await asyncio.sleep(float(exc.args[0]) * (1 + random.random()))
                continue
            except ConnectionError:
                self.pool.discard(conn)
                continue
            self.pool.release(conn)
            return vectors
        raise BackendDown("gave up after %d attempts" % self.retries)

    async def _leg(self, payload):
        async with self.pool.lease() as conn:  # clean: near miss, the loser is cancelled and the lease discards it
            return await self._roundtrip(conn, payload)

    async def embed_hedged(self, texts):
        payload = {"texts": texts}
        first = asyncio.create_task(self._leg(payload))
        done, _ = await asyncio.wait({first}, timeout=self.hedge_after)
        if done:
            return first.result()
        second = asyncio.create_task(self._leg(payload))
        done, pending = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return done.pop().result()

    async def ingest(self, index, batches):
        conn = await self.pool.acquire()  # leak: StreamSession.close() returns without releasing when nothing was sent
        session = StreamSession(self.pool, conn, index)
        try:
            async for rows in batches:
                if rows:
                    await session.push(rows)
        finally:
            await session.close()
        return session.sent

    async def submit(self, texts, sink):
        conn = await self.pool.acquire()  # leak: _finished() ignores a task that stop() has cancelled
        task = asyncio.create_task(self._roundtrip(conn, {"texts": texts}))
        self._tasks.add(task)
        task.add_done_callback(lambda t: self._finished(t, conn, sink))
        return task

    def _finished(self, task, conn, sink):
        self._tasks.discard(task)
        if task.cancelled():
            return
        if task.exception() is not None:
            self.pool.discard(conn)
            logger.warning("submit failed: %s", task.exception())
            return
        self.pool.release(conn)
        sink(task.result())

    async def ping(self):
        if self._control is None:
            return False
        began = time.monotonic()
        await self._roundtrip(self._control, {"ping": True})
        logger.debug("ping %.1f ms", 1e3 * (time.monotonic() - began))
        return True
