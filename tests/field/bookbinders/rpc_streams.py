"""Multiplexed RPC: many streams over one connection, with windows for flow control."""
import asyncio
import contextlib
import logging
import struct
from collections import deque

import msgpack

log = logging.getLogger("rpc")

DATA, ACK, RST = 0, 1, 2
MAX_FRAME = 16384
HEADER = struct.Struct("!BHI")


class TooManyStreams(Exception):
    pass


class StreamClosed(Exception):
    pass


class Window:
    def __init__(self, size):
        self._left = size
        self._cond = asyncio.Condition()

    async def take(self, n):
        async with self._cond:
            await self._cond.wait_for(lambda: self._left >= n)
            self._left -= n

    async def give(self, n):
        async with self._cond:
            self._left += n
            self._cond.notify_all()

    @contextlib.asynccontextmanager
    async def budget(self, n):
        await self.take(n)  # clean: given when the block ends
        try:
            yield
        finally:
            await self.give(n)


class BufPool:
    def __init__(self, size, count):
        self._stack = [bytearray(size) for _ in range(count)]
        self._size = size
        self.extra = 0

    def lend(self):
        if self._stack:
            return self._stack.pop()  # clean: goes to the caller
        self.extra += 1
        return bytearray(self._size)

    def back(self, buf):
        self._stack.append(buf)


class Stream:
    def __init__(self, mux, sid, method):
        self.mux = mux
        self.sid = sid
        self.method = method
        self.closed = False
        self._inbox = asyncio.Queue()

    async def send(self, obj):
        data = msgpack.packb({"m": self.method, "o": obj})
        for at in range(0, len(data), MAX_FRAME):
            chunk = data[at:at + MAX_FRAME]
            await self.mux.window.take(len(chunk))  # leak: on a closed stream no frame goes out, so no ACK ever gives the credit
            if self.closed:
                raise StreamClosed(self.sid)
            await self.mux.write(DATA, self.sid, chunk)

    async def recv(self):
        obj = await self._inbox.get()
        if obj is None:
            raise StreamClosed(self.sid)
        return obj

    async def ask(self, obj):
        await self.send(obj)
        return await self.recv()

    def fail(self):
        self.closed = True
        self._inbox.put_nowait(None)

    def feed(self, obj):
        self._inbox.put_nowait(obj)


class Mux:
    def __init__(self, reader, writer, max_streams=128):
        self.reader = reader
        self.writer = writer
        self.window = Window(1 << 20)
        self.inflight = Window(64)
        self.bufs = BufPool(MAX_FRAME + HEADER.size, 16)
        self._ids = deque(range(1, max_streams + 1))
        self._live = {}

    def open_stream(self, method):
        if not self._ids:
            raise TooManyStreams(method)
        sid = self._ids.popleft()  # leak: when the peer resets a stream, run() takes it from _live and retire() no longer returns the id
        st = Stream(self, sid, method)
        self._live[sid] = st
        return st

    def retire(self, st):
        st.closed = True
        if self._live.pop(st.sid, None) is not None:
            self._ids.append(st.sid)

    async def write(self, kind, sid, body):
        buf = self.bufs.lend()  # clean: goes back in the finally
        try:
            HEADER.pack_into(buf, 0, kind, sid, len(body))
            end = HEADER.size + len(body)
            buf[HEADER.size:end] = body
            self.writer.write(bytes(memoryview(buf)[:end]))
        finally:
            self.bufs.back(buf)
        await self.writer.drain()

    async def read_message(self):
        kind, sid, size = HEADER.unpack(await self.reader.readexactly(HEADER.size))
        buf = self.bufs.lend()  # leak: an empty body (the keepalive) returns before the back()
        if size == 0:
            return kind, sid, None
        view = memoryview(buf)
        view[:size] = await self.reader.readexactly(size)
        obj = msgpack.unpackb(bytes(view[:size]))
        view.release()
        self.bufs.back(buf)
        return kind, sid, obj

    async def run(self):
        while True:
            kind, sid, obj = await self.read_message()
            if kind == ACK:
                await self.window.give(obj)
            elif kind == RST:
                st = self._live.pop(sid, None)
                if st is not None:
                    st.fail()
            elif sid in self._live and obj is not None:
                self._live[sid].feed(obj)

    async def call(self, method, obj, timeout=2.0):
        async with self.inflight.budget(1):  # clean: the context manager gives it
            st = self.open_stream(method)  # clean: retired in the finally
            try:
                await st.send(obj)
                return await asyncio.wait_for(st.recv(), timeout)
            finally:
                self.retire(st)


async def upload(mux, parts):
    st = None
    sent = 0
    try:
        async for part in parts:
            if st is None:
                st = mux.open_stream("put")  # clean: near miss, opened with the first part only and the finally asks whether it was
            await st.send(part)
            sent += len(part)
    except StreamClosed:
        log.warning("the peer closed the upload after %d bytes", sent)
        return None
    finally:
        if st is not None:
            mux.retire(st)
    return sent


class Feed:
    """A topic that the server pushes."""

    def __init__(self, mux, topic):
        self._mux = mux
        self._topic = topic
        self._st = mux.open_stream("subscribe")  # leak: close() tells the peer and forgets the stream, nobody retires it
        self.seen = 0

    async def begin(self):
        await self._st.send({"topic": self._topic})

    async def items(self, limit):
        while self.seen < limit:
            yield await self._st.recv()
            self.seen += 1

    async def close(self):
        await self._st.send({"topic": self._topic, "off": True})
        self._st.closed = True
        self._st = None


async def tail(mux, topic, limit, on_item):
    feed = Feed(mux, topic)  # clean: closed in the finally
    try:
        await feed.begin()
        async for item in feed.items(limit):
            on_item(item)
    finally:
        await feed.close()


class Duplex:
    def __init__(self, mux, method):
        self._mux = mux
        self._method = method

    async def __aenter__(self):
        self.up = self._mux.open_stream(self._method + ".up")  # leak: the second open raises TooManyStreams, and __aexit__ isn't called then
        self.down = self._mux.open_stream(self._method + ".down")  # clean: retired by __aexit__
        return self

    async def __aexit__(self, *exc):
        self._mux.retire(self.down)
        self._mux.retire(self.up)


async def translate(mux, chunks):
    out = []
    async with Duplex(mux, "translate") as dx:  # clean: both are retired by __aexit__
        for chunk in chunks:
            await dx.up.send(chunk)
            out.append(await dx.down.recv())
    return out


def post(mux, method, obj):
    """Send and don't wait for anything."""
    st = mux.open_stream(method)  # clean: near miss, the task's done callback retires it
    task = asyncio.ensure_future(st.send(obj))
    task.add_done_callback(lambda _t: mux.retire(st))
    return task


async def fan_out(mux, methods, obj):
    streams = []
    try:
        for m in methods:
            streams.append(mux.open_stream(m))  # clean: near miss, those that were opened are retired in the finally
        return await asyncio.gather(*(st.ask(obj) for st in streams))
    finally:
        for st in streams:
            mux.retire(st)
