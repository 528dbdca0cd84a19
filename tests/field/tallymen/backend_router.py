"""Routes completions to inference backends over pooled connections."""
import asyncio
import contextlib
import json
import logging
import random
import time

logger = logging.getLogger("router")

MIN_VERSION = 3
IDLE_SECONDS = 45.0


class UpstreamDown(Exception):
    pass


class ProtocolError(Exception):
    pass


class NoBackend(Exception):
    pass


class Conn:
    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer
        self.touched = time.monotonic()

    def stale(self):
        return time.monotonic() - self.touched > IDLE_SECONDS or self.writer.is_closing()

    async def send(self, body):
        self.writer.write(json.dumps(body).encode() + b"\n")
        await self.writer.drain()

    async def recv(self):
        line = await self.reader.readline()
        if not line:
            raise ProtocolError("eof")
        self.touched = time.monotonic()
        try:
            return json.loads(line)
        except ValueError as exc:
            raise ProtocolError("bad frame") from exc

    async def roundtrip(self, body):
        await self.send(body)
        return await self.recv()

    async def chunks(self):
        while True:
            msg = await self.recv()
            yield msg
            if msg.get("final"):
                return

    def close(self):
        self.writer.close()


class BackendPool:
    def __init__(self, host, port, limit=32, keep=8):
        self.host, self.port = host, port
        self.keep = keep
        self._sem = asyncio.Semaphore(limit)
        self._idle = []
        self.stale_seen = 0
        self.healthy = True

    async def _dial(self):
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)  # leak: an old peer raises below, the socket stays open
        except OSError as exc:
            raise UpstreamDown(f"{self.host}:{self.port}") from exc
        conn = Conn(reader, writer)
        hello = await conn.roundtrip({"op": "hello"})
        if hello.get("version", 0) < MIN_VERSION:
            raise UpstreamDown(f"{self.host} speaks version {hello.get('version')}")
        return conn

    async def checkout(self, timeout):
        await asyncio.wait_for(self._sem.acquire(), timeout)  # leak: a dial that fails leaves the permit taken
        while self._idle:
            conn = self._idle.pop()  # leak: a stale connection is skipped and never closed
            if conn.stale():
                self.stale_seen += 1
                continue
            return conn
        conn = await self._dial()  # clean: handed to the caller
        return conn

    def checkin(self, conn, reusable=True):
        if reusable and len(self._idle) < self.keep:
            self._idle.append(conn)
        else:
            conn.close()
        self._sem.release()

    async def warm(self, count):
        for _ in range(count):
            try:
                conn = await self._dial()  # clean: near miss, kept in the idle list, needs no permit
            except UpstreamDown:
                logger.info("warmup of %s stopped", self.host)
                break
            self._idle.append(conn)

    @contextlib.asynccontextmanager
    async def borrowed(self, timeout=5.0):
        conn = await self.checkout(timeout)  # clean: given back in the finally
        ok = False
        try:
            yield conn
            ok = True
        finally:
            self.checkin(conn, reusable=ok)

    def close(self):
        while self._idle:
            self._idle.pop().close()  # clean: closed on the spot


class Router:
    def __init__(self, pools):
        self.pools = pools          # model name -> list of BackendPool
        self._sticky = {}
        self._sticky_lock = asyncio.Lock()
        self._closing = asyncio.Event()

    def _candidates(self, model):
        pools = [p for p in self.pools.get(model, ()) if p.healthy]
        random.shuffle(pools)
        return pools

    async def complete(self, req):
        last = None
        for pool in self._candidates(req["model"]):
            try:
                conn = await pool.checkout(5.0)  # clean: near miss, the continue below still runs the finally
            except (UpstreamDown, ProtocolError, asyncio.TimeoutError) as exc:
                last = exc
                continue
            ok = False
            try:
                reply = await conn.roundtrip(req)
                ok = True
            except ProtocolError as exc:
                logger.warning("backend %s: %s", pool.host, exc)
                last = exc
                continue
            finally:
                pool.checkin(conn, reusable=ok)
            return reply
        raise NoBackend(req["model"]) from last

    async def stream(self, req):
        pools = self._candidates(req["model"])
        if not pools:
            raise NoBackend(req["model"])
        pool = pools[0]
        conn = await pool.checkout(5.0)  # leak: an error event ends the generator before the checkin
        await conn.send({**req, "stream": True})
        async for msg in conn.chunks():
            if "error" in msg:
                yield {"type": "error", "detail": msg["error"]}
                return
            yield {"type": "delta", "text": msg.get("text", "")}
        pool.checkin(conn)

    async def _attempt(self, pool, req):
        conn = await pool.checkout(2.0)  # leak: the hedge cancels the loser, CancelledError is no Exception
        try:
            reply = await conn.roundtrip(req)
        except Exception:
            pool.checkin(conn, reusable=False)
            raise
        pool.checkin(conn)
        return reply

    async def hedged(self, req, delay=0.3):
        pools = self._candidates(req["model"])[:2]
        if not pools:
            raise NoBackend(req["model"])
        tasks = [asyncio.create_task(self._attempt(pools[0], req))]
        done, _ = await asyncio.wait(tasks, timeout=delay)
        if not done and len(pools) > 1:
            tasks.append(asyncio.create_task(self._attempt(pools[1], req)))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        elif not done:
            done, _ = await asyncio.wait(tasks)
        for t in tasks:
            if t not in done:
                t.cancel()
        return next(iter(done)).result()

    async def embed(self, model, texts, fanout=4):
        pools = self._candidates(model)
        if not pools:
            raise NoBackend(model)
        held = []
        try:
            for i in range(min(fanout, len(texts))):
                pool = pools[i % len(pools)]
                held.append((pool, await pool.checkout(5.0)))  # clean: near miss, what is held so far is given back in the finally
            jobs = []
            for i, (_, conn) in enumerate(held):
                jobs.append(conn.roundtrip({"op": "embed", "texts": texts[i::len(held)]}))
            return await asyncio.gather(*jobs)
        finally:
            for pool, conn in held:
                pool.checkin(conn)

    async def attach(self, session_id, model):
        async with self._sticky_lock:
            if session_id in self._sticky:
                return self._sticky[session_id][1]
            pools = self._candidates(model)
            if not pools:
                raise NoBackend(model)
            conn = await pools[0].checkout(5.0)  # clean: near miss, lives in the sticky table until detach() or close()
            self._sticky[session_id] = (pools[0], conn)
            return conn

    def detach(self, session_id):
        entry = self._sticky.pop(session_id, None)
        if entry is not None:
            entry[0].checkin(entry[1])

    async def health_loop(self, every=5.0):
        while not self._closing.is_set():
            for pool in [p for ps in self.pools.values() for p in ps]:
                try:
                    async with pool.borrowed(1.0) as conn:  # clean: left with the block
                        pong = await conn.roundtrip({"op": "ping"})
                    pool.healthy = bool(pong.get("ok"))
                except (UpstreamDown, ProtocolError, asyncio.TimeoutError):
                    pool.healthy = False
            await asyncio.sleep(every)

    async def close(self):
        self._closing.set()
        for sid in list(self._sticky):
            self.detach(sid)
        for pools in self.pools.values():
            for pool in pools:
                pool.close()
