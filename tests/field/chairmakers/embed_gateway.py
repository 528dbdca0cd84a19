"""Gateway in front of a fleet of embedding servers.

Every tenant has a budget of tokens in flight, every backend a limited number of
connections. Requests are packed into batches, retried, and hedged when they are slow.
"""
from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
from collections import deque
from typing import Any, AsyncIterator, Optional

logger = logging.getLogger("gateway")


class Overloaded(Exception):
    """The client should come back later."""


class BackendError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"backend answered {status}")
        self.status = status


class Permit:
    __slots__ = ("bucket", "cost", "open")

    def __init__(self, bucket: "TenantBucket", cost: int) -> None:
        self.bucket, self.cost, self.open = bucket, cost, True

    def close(self) -> None:
        if self.open:
            self.open = False
            self.bucket.in_flight -= self.cost
            self.bucket.wake.set()

    async def __aenter__(self) -> "Permit":
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self.close()


class TenantBucket:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_flight = 0
        self.wake = asyncio.Event()

    def grab(self, cost: int) -> Permit:
        """A permit right away, or Overloaded."""
        if self.in_flight + cost > self.limit:
            raise Overloaded(f"{self.in_flight} of {self.limit} tokens in flight")
        self.in_flight += cost
        return Permit(self, cost)  # clean: the caller closes it

    async def wait_for(self, cost: int) -> Permit:
        while True:
            try:
                return self.grab(cost)  # clean: returned
            except Overloaded:
                self.wake.clear()
                await self.wake.wait()


class Conn:
    def __init__(self, backend: "Backend", reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.backend, self.reader, self.writer = backend, reader, writer
        self.dirty = False

    async def post(self, texts: list[str]) -> list[list[float]]:
        body = json.dumps({"input": texts}).encode()
        self.dirty = True
        self.writer.write(b"POST /embed %d\r\n" % len(body) + body)
        await self.writer.drain()
        head = (await self.reader.readline()).split()
        status, size = int(head[0]), int(head[1])
        payload = await self.reader.readexactly(size)
        self.dirty = False
        if status != 200:
            raise BackendError(status)
        return json.loads(payload)["data"]


class Backend:
    def __init__(self, host: str, port: int, limit: int) -> None:
        self.host, self.port = host, port
        self.room = asyncio.Semaphore(limit)
        self.idle: deque[Conn] = deque()
        self.ejected_until = 0.0

    async def checkout(self) -> Conn:
        await self.room.acquire()  # clean: near miss, released when there is no connection, otherwise by checkin()
        if self.idle:
            return self.idle.pop()  # clean: handed to the caller
        try:
            r, w = await asyncio.open_connection(self.host, self.port)  # clean: the Conn has the writer and checkin() closes or keeps it
        except BaseException:
            self.room.release()
            raise
        return Conn(self, r, w)

    def checkin(self, conn: Conn) -> None:
        if conn.dirty:
            conn.writer.close()
        else:
            self.idle.append(conn)
        self.room.release()

    @contextlib.asynccontextmanager
    async def conn(self) -> AsyncIterator[Conn]:
        c = await self.checkout()  # clean: checked in by the finally
        try:
            yield c
        finally:
            self.checkin(c)


class Fleet:
    def __init__(self, backends: list[Backend]) -> None:
        self.backends = backends

    def choose(self) -> Backend:
        now = time.monotonic()
        up = [b for b in self.backends if b.ejected_until <= now]
        if not up:
            raise Overloaded("no backend is up")
        return min(random.sample(up, min(2, len(up))), key=lambda b: b.room.locked())

    async def embed(self, texts: list[str], tries: int = 3) -> list[list[float]]:
        for attempt in range(tries):
            backend = self.choose()
            conn = await backend.checkout()  # leak: an error below 500 is raised on without checking the connection in
            try:
                out = await conn.post(texts)
            except BackendError as exc:
                if exc.status < 500:
                    raise
                backend.checkin(conn)
                backend.ejected_until = time.monotonic() + 2 ** attempt
                continue
            except (OSError, asyncio.IncompleteReadError):
                backend.checkin(conn)
                continue
            backend.checkin(conn)
            return out
        raise Overloaded(f"gave up after {tries} tries")

    async def hedged(self, texts: list[str], after: float) -> list[list[float]]:
        """The same request to a second backend when the first takes too long; the slower one is cancelled."""
        tasks = [asyncio.create_task(self._once(texts))]
        done, _ = await asyncio.wait(tasks, timeout=after)
        if not done:
            tasks.append(asyncio.create_task(self._once(texts)))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for t in tasks:
            if t not in done:
                t.cancel()
        return done.pop().result()

    async def _once(self, texts: list[str]) -> list[list[float]]:
        async with self.choose().conn() as c:  # clean: near miss, cancelling the slower of two goes through the context manager
            return await c.post(texts)

    async def warm(self) -> int:
        """Opens a connection to each backend before traffic comes."""
        opened = 0
        for backend in self.backends:
            conn = await backend.checkout()  # leak: a backend that does not answer the probe is ejected with the connection out
            try:
                await conn.post(["warm"])
            except BackendError:
                backend.ejected_until = time.monotonic() + 30
                continue
            backend.checkin(conn)
            opened += 1
        return opened


class Pending:
    def __init__(self, text: str, permit: Permit) -> None:
        self.text, self.permit = text, permit
        self.future: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()


class Gateway:
    def __init__(self, fleet: Fleet, limits: dict[str, int], max_batch: int = 32) -> None:
        self.fleet, self.max_batch = fleet, max_batch
        self.buckets = {t: TenantBucket(n) for t, n in limits.items()}
        self.pending: deque[Pending] = deque()

    def submit(self, tenant: str, text: str) -> asyncio.Future[list[float]]:
        permit = self.buckets[tenant].grab(len(text) // 4 + 1)  # leak: flush() sets the exception of a failed batch and does not close its permits
        item = Pending(text, permit)
        self.pending.append(item)
        return item.future

    async def flush(self) -> None:
        batch = [self.pending.popleft() for _ in range(min(self.max_batch, len(self.pending)))]
        if not batch:
            return
        try:
            vectors = await self.fleet.embed([p.text for p in batch])
        except (Overloaded, BackendError) as exc:
            for p in batch:
                p.future.set_exception(exc)
            return
        for p, v in zip(batch, vectors):
            p.permit.close()
            p.future.set_result(v)

    async def embed_now(self, tenant: str, text: str) -> list[float]:
        async with self.buckets[tenant].grab(len(text) // 4 + 1):  # clean: the permit is its own context manager
            return (await self.fleet.hedged([text], after=0.2))[0]

    async def embed_file(self, tenant: str, lines: list[str]) -> list[list[float]]:
        bucket = self.buckets[tenant]
        out: list[list[float]] = []
        permit: Optional[Permit] = None
        for lo in range(0, len(lines), self.max_batch):
            part = lines[lo:lo + self.max_batch]
            permit = await bucket.wait_for(sum(len(t) // 4 + 1 for t in part))  # leak: every round rebinds it, and only the last is closed
            out.extend(await self.fleet.embed(part))
        if permit is not None:
            permit.close()
        return out

    async def compare(self, tenant: str, a: str, b: str) -> Optional[float]:
        bucket = self.buckets[tenant]
        first = bucket.grab(len(a) // 4 + 1)  # leak: Overloaded for the second text returns None with the first permit open
        try:
            second = bucket.grab(len(b) // 4 + 1)  # clean: near miss, both are closed in the finally
        except Overloaded:
            return None
        try:
            va, vb = await self.fleet.embed([a, b])
            return sum(x * y for x, y in zip(va, vb))
        finally:
            first.close()
            second.close()
