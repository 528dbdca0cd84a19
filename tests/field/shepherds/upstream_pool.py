"""Async connection pool to inference backends, with retries, hedging and sticky sessions."""
import asyncio
import json
import logging
import random
import time
from collections import deque

log = logging.getLogger(__name__)


class UpstreamDown(Exception):
    pass


class UpstreamBusy(Exception):
    def __init__(self, retry_after):
        super().__init__(f"retry after {retry_after}s")
        self.retry_after = retry_after


class PoolTimeout(Exception):
    pass


class Conn:
    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer
        self.born = time.monotonic()
        self.broken = False
        self.requests = 0

    async def call(self, payload):
        self.requests += 1
        self.writer.write(json.dumps(payload).encode() + b"\n")
        await self.writer.drain()
        line = await self.reader.readline()
        if not line:
            self.broken = True
            raise UpstreamDown("peer closed")
        msg = json.loads(line)
        if msg.get("status") == 429:
            raise UpstreamBusy(float(msg.get("retry_after", 0.1)))
        return msg

    def close(self):
        self.writer.close()


class BackendPool:
    """At most `size` connections. A permit of the semaphore is held for every connection handed out."""

    def __init__(self, host, port, size=16, max_age=300.0):
        self.host, self.port = host, port
        self.max_age = max_age
        self._permits = asyncio.Semaphore(size)
        self._idle = deque()
        self.stats = {"dialled": 0, "reused": 0, "evicted": 0}

    async def _dial(self):
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)  # leak: a rejected hello raises and the socket is not closed
        except OSError as exc:
            raise UpstreamDown(f"{self.host}:{self.port}: {exc}") from exc
        writer.write(b"HELLO 2\n")
        banner = await reader.readline()
        if not banner.startswith(b"OK"):
            raise UpstreamDown(f"bad banner {banner!r}")
        self.stats["dialled"] += 1
        return Conn(reader, writer)

    def _reuse(self):
        while self._idle:
            conn = self._idle.pop()  # clean: near miss, the stale one is closed before the loop goes on
            if time.monotonic() - conn.born > self.max_age:
                conn.close()
                self.stats["evicted"] += 1
                continue
            self.stats["reused"] += 1
            return conn
        return None

    async def acquire(self, timeout=5.0):
        try:
            await asyncio.wait_for(self._permits.acquire(), timeout)  # leak: when _dial raises UpstreamDown the permit is not put back
        except asyncio.TimeoutError:
            raise PoolTimeout(f"no connection within {timeout}s") from None
        conn = self._reuse()  # clean: handed to the caller
        if conn is None:
            conn = await self._dial()  # clean: handed to the caller
        return conn

    def release(self, conn):
        if conn.broken:
            conn.close()
        else:
            self._idle.append(conn)
        self._permits.release()

    def evict(self, conn):
        conn.broken = True
        self.stats["evicted"] += 1
        self.release(conn)

    def close(self):
        while self._idle:
            self._idle.popleft().close()  # clean: closed at once


class Client:
    def __init__(self, pool, retries=3):
        self.pool = pool
        self.retries = retries
        self._sticky = {}
        self._reserved = {}

    async def complete(self, payload):
        """One request; a dead backend is tried again on a fresh connection, a busy one after a pause."""
        last = None
        for attempt in range(self.retries):
            conn = await self.pool.acquire()  # leak: the UpstreamBusy branch sleeps and loops without release
            try:
                reply = await conn.call(payload)
            except UpstreamBusy as busy:
                last = busy
                await asyncio.sleep(busy.retry_after * (1 + random.random()))
                continue
            except UpstreamDown as exc:
                last = exc
                self.pool.evict(conn)
                continue
            self.pool.release(conn)
            return reply
        raise last

    async def stream(self, payload):
        conn = await self.pool.acquire()  # clean: near miss, finally also runs when the consumer closes the generator
        try:
            first = await conn.call({**payload, "stream": True})
            yield first
            while not first.get("done"):
                line = await conn.reader.readline()
                if not line:
                    conn.broken = True
                    return
                first = json.loads(line)
                yield first
        finally:
            self.pool.release(conn)

    async def hedged(self, payload, delay=0.2):
        primary = await self.pool.acquire()  # leak: PoolTimeout or UpstreamDown of the second acquire leaves the first one held
        task = asyncio.ensure_future(primary.call(payload))
        done, _ = await asyncio.wait({task}, timeout=delay)
        if done:
            self.pool.release(primary)
            return task.result()
        backup = await self.pool.acquire(timeout=0.5)  # clean: the finally below gives both back
        other = asyncio.ensure_future(backup.call(payload))
        try:
            done, pending = await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
            for p in pending:
                p.cancel()
            # an interrupted exchange leaves bytes on the wire
            primary.broken = task in pending
            backup.broken = other in pending
            return next(iter(done)).result()
        finally:
            self.pool.release(primary)
            self.pool.release(backup)

    async def pin(self, session):
        """All calls of a session go over one connection, the backend keeps its prefix there."""
        conn = self._sticky.get(session)
        if conn is not None and not conn.broken:
            return conn
        conn = await self.pool.acquire()  # clean: near miss, the broken one it replaces is released before the table is written
        old = self._sticky.pop(session, None)
        if old is not None:
            self.pool.release(old)
        self._sticky[session] = conn
        return conn

    def unpin(self, session):
        conn = self._sticky.pop(session, None)
        if conn:
            self.pool.release(conn)

    async def reserve(self, model):
        """Keep one connection aside for a model whose traffic must not queue behind the others."""
        if model not in self._reserved:
            conn = await self.pool.acquire()  # leak: close() gives back the pinned connections only, the reserved ones stay out
            if model in self._reserved:
                # somebody was faster while we waited
                self.pool.release(conn)
            else:
                self._reserved[model] = conn
        return self._reserved[model]

    async def complete_reserved(self, model, payload):
        conn = await self.reserve(model)  # clean: it stays in the table and is only borrowed here
        return await conn.call(payload)

    async def probe(self, every=10.0):
        while True:
            await asyncio.sleep(every)
            try:
                conn = await self.pool.acquire(timeout=1.0)  # clean: evict() releases too
            except (PoolTimeout, UpstreamDown):
                log.warning("probe: no connection")
                continue
            try:
                await conn.call({"op": "ping"})
            except (UpstreamBusy, UpstreamDown) as exc:
                log.info("probe failed: %s", exc)
                self.pool.evict(conn)
            else:
                self.pool.release(conn)

    async def warm(self, n):
        held = []
        try:
            for _ in range(n):
                held.append(await self.pool.acquire(timeout=1.0))  # clean: the finally gives back what was collected
        except (PoolTimeout, UpstreamDown) as exc:
            log.info("warm stopped at %d: %s", len(held), exc)
        finally:
            for conn in held:
                self.pool.release(conn)
        return len(held)

    async def close(self):
        for session in list(self._sticky):
            self.unpin(session)
        self.pool.close()
