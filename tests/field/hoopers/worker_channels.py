"""Client side of the engine workers: pooled channels, unary and streaming calls."""
import asyncio
import json
import logging
import random
import time
from collections import defaultdict

log = logging.getLogger("channels")

PROTO = 7

class PoolBusy(Exception): ...

class HandshakeError(Exception): ...

class WorkerGone(Exception):
    pass

class Channel:
    def __init__(self, addr, reader, writer):
        self.addr = addr
        self.reader = reader
        self.writer = writer
        self.born = time.monotonic()
        self._seq = 0

    def healthy(self):
        return not self.writer.is_closing() and not self.reader.at_eof()

    async def send(self, method, payload):
        self._seq += 1
        data = json.dumps({"seq": self._seq, "m": method, "p": payload}).encode()
        self.writer.write(len(data).to_bytes(4, "big") + data)
        await self.writer.drain()

    async def recv(self):
        try:
            head = await self.reader.readexactly(4)
            return json.loads(await self.reader.readexactly(int.from_bytes(head, "big")))
        except asyncio.IncompleteReadError as exc:
            raise WorkerGone(self.addr) from exc

    async def call(self, method, payload=None):
        await self.send(method, payload)
        return await self.recv()

    def close(self):
        self.writer.close()

class ChannelPool:
    def __init__(self, per_addr=8, max_age=600.0):
        self._idle = defaultdict(list)
        self._busy = defaultdict(set)
        self.per_addr = per_addr
        self.max_age = max_age

    async def checkout(self, addr):
        idle = self._idle[addr]
        while idle:
            ch = idle.pop()  # clean: stale channels are closed and fresh ones returned
            if ch.healthy() and time.monotonic() - ch.born < self.max_age:
                self._busy[addr].add(ch)
                return ch
            ch.close()
        if len(self._busy[addr]) >= self.per_addr:
            raise PoolBusy(addr)
        reader, writer = await asyncio.open_connection(*addr)  # leak: HandshakeError (or WorkerGone) leaves the socket open
        ch = Channel(addr, reader, writer)
        hello = await ch.call("hello", {"proto": PROTO})
        if hello.get("proto") != PROTO:
            raise HandshakeError(f"{addr} speaks {hello.get('proto')}")
        self._busy[addr].add(ch)
        return ch

    def checkin(self, ch, broken=False):
        self._busy[ch.addr].discard(ch)
        if broken or not ch.healthy():
            ch.close()
        else:
            self._idle[ch.addr].append(ch)

    async def warm(self, addr, n):
        chans = [await self.checkout(addr) for _ in range(n)]  # leak: PoolBusy in the middle drops the channels taken so far
        for ch in chans:
            self.checkin(ch)
        return len(chans)

    def close(self):
        for chans in self._idle.values():
            while chans:
                chans.pop().close()  # clean: closed on the same line

class Subscription:
    """Server push: load reports of one worker, handed to a callback."""

    def __init__(self, pool, ch, topic, on_event):
        self._pool = pool
        self._ch = ch
        self._topic = topic
        self._on_event = on_event
        self._pump = None

    @classmethod
    async def open(cls, pool, addr, topic, on_event):
        ch = await pool.checkout(addr)  # leak: close() of the Subscription stops the pump and forgets the channel
        sub = cls(pool, ch, topic, on_event)
        sub._pump = asyncio.create_task(sub._run())
        return sub

    async def _run(self):
        await self._ch.send("subscribe", {"topic": self._topic})
        while True:
            self._on_event(await self._ch.recv())

    async def close(self):
        self._pump.cancel()
        try:
            await self._pump
        except (asyncio.CancelledError, WorkerGone):
            pass

class Heartbeat:
    def __init__(self, pool, addr, interval=2.0):
        self._pool, self._addr, self._interval = pool, addr, interval
        self._task = None

    def start(self):
        if self._task is None:
            self._task = asyncio.create_task(self._loop())

    async def _loop(self):
        ch = None
        while True:
            try:
                if ch is None:
                    ch = await self._pool.checkout(self._addr)  # clean: near miss, both handlers give it back before ch is reset or the task ends
                await asyncio.wait_for(ch.call("ping"), self._interval)
            except asyncio.CancelledError:
                if ch is not None:
                    self._pool.checkin(ch, broken=True)
                raise
            except (PoolBusy, HandshakeError, WorkerGone, asyncio.TimeoutError) as exc:
                log.warning("heartbeat of %s: %r", self._addr, exc)
                if ch is not None:
                    self._pool.checkin(ch, broken=True)
                    ch = None
            try:
                await asyncio.sleep(self._interval)
            except asyncio.CancelledError:
                if ch is not None:
                    self._pool.checkin(ch)
                raise

    async def stop(self):
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

class WorkerClient:
    def __init__(self, pool, addrs):
        self.pool = pool
        self.addrs = list(addrs)
        self._sticky = {}

    async def unary(self, addr, method, payload, timeout=5.0, retries=3):
        last = None
        for attempt in range(retries):
            ch = await self.pool.checkout(addr)  # leak: a timeout goes on with the next attempt and a new channel
            try:
                reply = await asyncio.wait_for(ch.call(method, payload), timeout)
            except asyncio.TimeoutError as exc:
                last = exc
                await asyncio.sleep(0.05 * 2 ** attempt + random.random() * 0.05)
                continue
            except WorkerGone:
                self.pool.checkin(ch, broken=True)
                raise
            self.pool.checkin(ch)
            return reply
        raise WorkerGone(addr) from last

    async def stream(self, addr, payload):
        ch = await self.pool.checkout(addr)  # clean: the finally checks it in, whoever closes the generator
        done = False
        try:
            await ch.send("generate", payload)
            while True:
                msg = await ch.recv()
                if msg.get("eos"):
                    done = True
                    return
                yield msg["token"]
        finally:
            self.pool.checkin(ch, broken=not done)

    async def broadcast(self, method, payload):
        chans = {}
        try:
            for addr in sorted(set(self.addrs)):
                chans[addr] = await self.pool.checkout(addr)  # clean: near miss, the addresses are distinct and the finally covers a failure half-way
            for ch in chans.values():
                await ch.send(method, payload)
            return {addr: await ch.recv() for addr, ch in chans.items()}
        finally:
            for ch in chans.values():
                self.pool.checkin(ch)

    async def session_call(self, sid, addr, method, payload):
        ch = self._sticky.get(sid)
        borrowed = ch is None
        if borrowed:
            ch = await self.pool.checkout(addr)  # clean: near miss, the flag tells whether this call has to check it in
        try:
            return await ch.call(method, payload)
        finally:
            if borrowed:
                self.pool.checkin(ch)

    async def begin_session(self, sid, addr):
        if sid in self._sticky:
            return
        ch = await self.pool.checkout(addr)  # clean: near miss, kept in the table until end_session, or checked in when another task was faster
        if sid in self._sticky:
            self.pool.checkin(ch)
            return
        self._sticky[sid] = ch

    def end_session(self, sid):
        ch = self._sticky.pop(sid, None)
        if ch is not None:
            self.pool.checkin(ch)

    async def copy_weights(self, src, dst, names):
        a = await self.pool.checkout(src)  # clean: outer finally
        try:
            b = await self.pool.checkout(dst)  # clean: inner finally
            try:
                for name in names:
                    blob = await a.call("get", {"name": name})
                    await b.call("put", {"name": name, "data": blob["data"]})
            finally:
                self.pool.checkin(b)
        finally:
            self.pool.checkin(a)

    async def submit(self, addr, payload, on_done):
        ch = await self.pool.checkout(addr)  # leak: _settled returns without checkin when the task was cancelled
        task = asyncio.create_task(ch.call("enqueue", payload))
        task.add_done_callback(lambda t: self._settled(ch, t, on_done))
        return task

    def _settled(self, ch, task, on_done):
        if task.cancelled():
            on_done(None)
            return
        failed = task.exception() is not None
        self.pool.checkin(ch, broken=failed)
        on_done(None if failed else task.result())
