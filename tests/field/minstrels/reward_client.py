"""Asyncio client for a fleet of reward-model servers (newline-delimited JSON over TCP)."""
import asyncio
import collections
import json
import logging
import random
import time

log = logging.getLogger("reward")

MAX_IDLE_S = 45.0


class HandshakeError(Exception):
    pass


class Rejected(Exception):
    def __init__(self, code, text):
        super().__init__("%d %s" % (code, text))
        self.code = code


class Conn:
    def __init__(self, reader, writer, model):
        self.reader = reader
        self.writer = writer
        self.model = model
        self.used = time.monotonic()
        self.broken = False

    async def call(self, payload):
        self.used = time.monotonic()
        self.writer.write(json.dumps(payload).encode() + b"\n")
        await self.writer.drain()
        line = await self.reader.readline()
        if not line:
            self.broken = True
            raise ConnectionResetError("server went away")
        answer = json.loads(line)
        if answer["code"] >= 500:
            raise Rejected(answer["code"], answer.get("text", ""))
        return answer

    def close(self):
        self.writer.close()


async def dial(host, port, model):
    reader, writer = await asyncio.open_connection(host, port)  # leak: the wrong model raises HandshakeError with the socket open
    writer.write(b'{"op": "hello"}\n')
    line = await reader.readline()
    hello = json.loads(line or b"{}")
    if hello.get("model") != model:
        raise HandshakeError("%s:%d serves %r" % (host, port, hello.get("model")))
    return Conn(reader, writer, model)


class ConnPool:
    def __init__(self, endpoints, model, limit):
        self.endpoints = list(endpoints)
        self.model = model
        self._sem = asyncio.Semaphore(limit)
        self._idle = collections.deque()
        self.dialed = 0
        self.closed = False

    async def acquire(self):
        await self._sem.acquire()  # leak: a HandshakeError out of dial is not an OSError, the permit stays taken
        while self._idle:
            conn = self._idle.pop()  # clean: near miss, stale ones are closed, the first fresh one is handed out
            if conn.broken or time.monotonic() - conn.used > MAX_IDLE_S:
                conn.close()
                continue
            return conn
        host, port = random.choice(self.endpoints)
        try:
            conn = await dial(host, port, self.model)  # clean: handed to the caller
        except OSError:
            self._sem.release()
            raise
        self.dialed += 1
        return conn

    def release(self, conn):
        if conn.broken or self.closed:
            conn.close()
        else:
            self._idle.append(conn)
        self._sem.release()

    async def ping_idle(self):
        """Called by the keeper every few seconds; looks at each idle connection once."""
        for _ in range(len(self._idle)):
            if not self._idle:
                break
            conn = self._idle.popleft()  # leak: a connection that fails its ping is neither closed nor kept
            try:
                await conn.call({"op": "ping"})
            except (ConnectionResetError, Rejected) as e:
                log.info("dropping idle connection: %s", e)
                continue
            self._idle.append(conn)

    def shutdown(self):
        self.closed = True
        while self._idle:
            self._idle.pop().close()  # clean: closed at once


class Lease:
    """async with Lease(pool) as conn"""

    def __init__(self, pool):
        self.pool = pool
        self.conn = None

    async def __aenter__(self):
        self.conn = await self.pool.acquire()  # clean: released in __aexit__
        return self.conn

    async def __aexit__(self, et, ev, tb):
        if et is not None and not issubclass(et, Rejected):
            self.conn.broken = True
        self.pool.release(self.conn)
        self.conn = None
        return False


async def score_batch(pool, prompts, completions):
    async with Lease(pool) as conn:  # clean: async with
        answer = await conn.call({"op": "score", "p": prompts, "c": completions})
    return answer["scores"]


async def score_with_retry(pool, item, attempts=4):
    """One score, or NaN when every attempt is turned away."""
    for k in range(attempts):
        conn = await pool.acquire()  # leak: after Rejected the loop goes on without release
        try:
            answer = await conn.call({"op": "score", "p": [item["prompt"]], "c": [item["text"]]})
        except Rejected as e:
            log.debug("attempt %d: %s", k, e)
            await asyncio.sleep(0.1 * 2 ** k)
            continue
        except ConnectionResetError:
            pool.release(conn)
            continue
        pool.release(conn)
        return answer["scores"][0]
    return float("nan")


async def warm(pool, n):
    """Dials n connections before the first batch arrives."""
    held = []
    try:
        for _ in range(n):
            held.append(await pool.acquire())  # clean: the finally gives back what there is
    except (OSError, HandshakeError) as e:
        log.warning("warmed only %d of %d: %s", len(held), n, e)
    finally:
        for conn in held:
            pool.release(conn)


async def hedged(pool, payload, after_s):
    """Asks a second server when the first is slow, and takes whichever answers first."""

    async def ask():
        conn = await pool.acquire()  # clean: near miss, cancel() of the loser runs the finally too
        try:
            return await conn.call(payload)
        except asyncio.CancelledError:
            conn.broken = True
            raise
        finally:
            pool.release(conn)

    first = asyncio.create_task(ask())
    done, _ = await asyncio.wait({first}, timeout=after_s)
    if done:
        return first.result()
    second = asyncio.create_task(ask())
    done, pending = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
    for t in pending:
        t.cancel()
    return done.pop().result()


class Comparer:
    """Keeps one connection to each of two pools for the length of a comparison run."""

    def __init__(self, old_pool, new_pool):
        self.old_pool, self.new_pool = old_pool, new_pool
        self.old = self.new = None
        self.diffs = []

    async def start(self):
        self.old = await self.old_pool.acquire()  # leak: compare() gives up when the second acquire fails, without stop()
        self.new = await self.new_pool.acquire()  # clean: kept on self and released in stop()

    async def one(self, prompt, text):
        payload = {"op": "score", "p": [prompt], "c": [text]}
        a, b = await asyncio.gather(self.old.call(payload), self.new.call(payload))
        self.diffs.append(abs(a["scores"][0] - b["scores"][0]))

    def stop(self):
        self.old_pool.release(self.old)
        self.new_pool.release(self.new)


async def compare(old_pool, new_pool, rows):
    c = Comparer(old_pool, new_pool)
    try:
        await c.start()
    except (OSError, HandshakeError) as e:
        log.error("comparison is off: %s", e)
        return None
    try:
        for prompt, text in rows:
            await c.one(prompt, text)
    except (ConnectionResetError, Rejected):
        log.exception("comparison ended after %d rows", len(c.diffs))
    finally:
        c.stop()
    return sum(c.diffs) / max(1, len(c.diffs))


async def keeper(pool, period):
    while not pool.closed:
        await asyncio.sleep(period)
        await pool.ping_idle()
