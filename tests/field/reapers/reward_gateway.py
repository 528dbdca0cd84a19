"""Reward-model gateway: judges behind HTTP, with a connection pool, budgets, hedging and micro-batching."""
import asyncio
import contextlib
import itertools
import json
import logging
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field

log = logging.getLogger("reward")


class ConnectError(OSError): ...
class Retryable(Exception): ...
class BudgetExceeded(Exception): ...


class Conn:
    _ids = itertools.count()

    def __init__(self, host, reader, writer):
        self.id, self.host = next(self._ids), host
        self.reader, self.writer = reader, writer
        self.born = time.monotonic()
        self.broken = False

    @property
    def expired(self):
        return self.broken or time.monotonic() - self.born > 300

    async def request(self, path, payload):
        body = json.dumps(payload).encode()
        self.writer.write(f"POST {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await self.writer.drain()
        status = await self.reader.readline()
        if b" 503 " in status or b" 429 " in status:
            raise Retryable(status)
        return json.loads(await self.reader.readline())

    async def lines(self, path, payload):
        yield await self.request(path, payload)
        while line := await self.reader.readline():
            yield json.loads(line)

    def close(self):
        self.writer.close()


class ConnPool:
    """At most `per_host` connections to a host are out; a permit goes with every one of them."""

    def __init__(self, per_host=8):
        self._permits = defaultdict(lambda: asyncio.Semaphore(per_host))
        self._idle = defaultdict(list)
        self.opened = 0

    async def _connect(self, host):
        try:
            reader, writer = await asyncio.open_connection(host, 8000)  # clean: wrapped in the Conn that is returned
        except OSError as exc:
            raise ConnectError(f"{host}: {exc}") from exc
        self.opened += 1
        return Conn(host, reader, writer)

    async def acquire(self, host):
        await self._permits[host].acquire()  # leak: a connect that fails raises with the permit taken
        while self._idle[host]:
            conn = self._idle[host].pop()  # clean: near miss, an expired one is closed before the next is tried
            if conn.expired:
                conn.close()
                continue
            return conn
        return await self._connect(host)  # clean: handed to the caller with its permit

    async def acquire_fresh(self, host):
        """Never reuses, for judges that keep state per connection."""
        permit = self._permits[host]
        await permit.acquire()  # clean: near miss, the handler releases it when the connect fails
        try:
            return await self._connect(host)  # clean: handed to the caller with its permit
        except ConnectError:
            permit.release()
            raise

    def release(self, conn):
        if conn.expired:
            conn.close()
        else:
            self._idle[conn.host].append(conn)
        self._permits[conn.host].release()


@dataclass
class Budget:
    total: int
    used: int = 0
    history: list = field(default_factory=list)

    def take(self, n):
        if self.used + n > self.total:
            raise BudgetExceeded(f"{self.used} + {n} > {self.total}")
        self.used += n
        return n

    def refund(self, n):
        self.used -= n
        self.history.append(self.used)


class Judge:
    def __init__(self, name, host, pool, budget):
        self.name, self.host, self.pool, self.budget = name, host, pool, budget
        self._session = None

    async def score(self, sample, attempts=4):
        for attempt in range(attempts):
            conn = await self.pool.acquire(self.host)  # clean: near miss, finally runs also for the return and the next attempt
            try:
                return float((await conn.request("/score", sample))["reward"])
            except Retryable:
                await asyncio.sleep(random.random() * 2 ** attempt)
            finally:
                self.pool.release(conn)
        return None

    async def _ask(self, conn, sample):
        reply = await conn.request("/score", sample)
        self.pool.release(conn)
        return float(reply["reward"])

    async def hedged(self, sample, delay=1.0):
        first = asyncio.create_task(self._ask(await self.pool.acquire(self.host), sample))  # leak: cancelling the slower task skips the release in _ask()
        done, _ = await asyncio.wait({first}, timeout=delay)
        if done:
            return first.result()
        second = asyncio.create_task(self._ask(await self.pool.acquire(self.host), sample))  # leak: cancelling the slower task skips the release in _ask()
        done, late = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        for task in late:
            task.cancel()
        return done.pop().result()

    async def find_verdict(self, sample):
        conn = await self.pool.acquire(self.host)  # leak: the return inside the loop comes before the release
        async for msg in conn.lines("/stream", sample):
            if "verdict" in msg:
                return msg["verdict"]
        self.pool.release(conn)
        return None

    async def chat(self, turn):
        if self._session is None:
            self._session = await self.pool.acquire_fresh(self.host)  # leak: after a Retryable the session is set to None without release
        try:
            return await self._session.request("/chat", turn)
        except Retryable:
            log.info("%s: session is started over", self.name)
            self._session = None
            return None

    async def close(self):
        if self._session is not None:
            self.pool.release(self._session)
            self._session = None


class MicroBatcher:
    def __init__(self, judge, max_batch=32, linger=0.02):
        self.judge, self.max_batch, self.linger = judge, max_batch, linger
        self._queue = asyncio.Queue()

    async def submit(self, sample):
        fut = asyncio.get_running_loop().create_future()
        await self._queue.put((sample, fut))
        return await fut

    async def run(self):
        while True:
            await asyncio.sleep(self.linger)
            n = self.judge.budget.take(self.max_batch)  # leak: an empty queue goes on to the next round without a refund
            batch = []
            while not self._queue.empty() and len(batch) < n:
                batch.append(self._queue.get_nowait())
            if not batch:
                continue
            asyncio.create_task(self._send(batch, n))

    async def _send(self, batch, n):
        try:
            results = await asyncio.gather(*(self.judge.score(s) for s, _ in batch))
            for (_, fut), r in zip(batch, results):
                fut.set_result(r)
        finally:
            self.judge.budget.refund(n)

    async def flush(self):
        batch = []
        while not self._queue.empty():
            batch.append(self._queue.get_nowait())
        if batch:
            await self._send(batch, self.judge.budget.take(len(batch)))  # clean: near miss, _send() refunds what it is given


@contextlib.asynccontextmanager
async def judged(judge, estimate):
    granted = judge.budget.take(estimate)  # clean: refunded in finally
    try:
        yield judge
    finally:
        judge.budget.refund(granted)
        await judge.close()


async def score_group(judge, samples):
    try:
        async with judged(judge, len(samples)) as j:  # clean: the context manager refunds
            scores = await asyncio.gather(*(j.score(s) for s in samples))
    except BudgetExceeded:
        return [None] * len(samples)
    mean = sum(s or 0.0 for s in scores) / max(len(scores), 1)
    return [None if s is None else s - mean for s in scores]
