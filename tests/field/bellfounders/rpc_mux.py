"""Multiplexes RPC streams of the model gateway over one socket.

A stream needs a stream id (heap, smallest first, so the peer can keep a dense table),
some send credit and, for unary calls, a frame buffer.
"""
import asyncio
import heapq
import itertools
import struct
from typing import Any, AsyncIterator, Callable, Dict, List, Optional

HDR = struct.Struct("!IBI")
DATA, END, RST = 0, 1, 2


class StreamsExhausted(Exception):
    pass


class PeerReset(Exception):
    pass


class IdSpace:
    def __init__(self, limit: int) -> None:
        self._heap = list(range(1, limit + 1))
        self.in_use: set = set()

    def lend(self) -> int:
        if not self._heap:
            raise StreamsExhausted()
        sid = heapq.heappop(self._heap)  # clean: handed to the caller
        self.in_use.add(sid)
        return sid

    def retire(self, sid: int) -> None:
        self.in_use.discard(sid)
        heapq.heappush(self._heap, sid)


class Window:
    """Byte credit. `claim` never blocks, `wait_claim` does."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes
        self._waiters: List[asyncio.Future] = []

    def claim(self, n: int) -> bool:
        if n > self.left:
            return False
        self.left -= n
        return True

    async def wait_claim(self, n: int) -> None:
        while not self.claim(n):  # clean: granted to the caller
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            await fut

    def refund(self, n: int) -> None:
        self.left += n
        waiters, self._waiters = self._waiters, []
        for fut in waiters:
            if not fut.done():
                fut.set_result(None)


class FrameBuffers:
    def __init__(self, size: int = 65536, keep: int = 32) -> None:
        self._stack = [bytearray(size) for _ in range(keep)]

    def lease(self) -> Optional[bytearray]:
        return self._stack.pop() if self._stack else None  # clean: handed to the caller

    def unlease(self, buf: bytearray) -> None:
        self._stack.append(buf)


class Stream:
    def __init__(self, sid: int, credit: int) -> None:
        self.sid = sid
        self.credit = credit
        self.inbox: asyncio.Queue = asyncio.Queue()
        self.on_close: Optional[Callable[[int], None]] = None
        self.closed = False


class Mux:
    CREDIT = 4096

    def __init__(self, writer: Any, *, streams: int = 256, window: int = 1 << 20) -> None:
        self._w = writer
        self._ids = IdSpace(streams)
        self._win = Window(window)
        self._frames = FrameBuffers()
        self._streams: Dict[int, Stream] = {}
        self._seq = itertools.count()
        self.draining = False

    # ---- lifecycle -----------------------------------------------------
    def open(self) -> Optional[Stream]:
        sid = self._ids.lend()  # leak: the id is not retired when the window refuses the credit
        if not self._win.claim(self.CREDIT):  # clean: goes with the stream, refunded in close_stream
            return None
        st = Stream(sid, self.CREDIT)
        self._streams[sid] = st
        return st

    async def open_wait(self) -> Stream:
        await self._win.wait_claim(self.CREDIT)  # leak: credit is not refunded when the mux is draining
        if self.draining:
            raise PeerReset("draining")
        try:
            sid = self._ids.lend()  # clean: handed to the caller inside the Stream, retired by close_stream
        except StreamsExhausted:
            self._win.refund(self.CREDIT)
            raise
        st = self._streams[sid] = Stream(sid, self.CREDIT)
        return st

    def close_stream(self, st: Stream) -> None:
        if st.closed:
            return
        st.closed = True
        self._streams.pop(st.sid, None)
        self._win.refund(st.credit)
        self._ids.retire(st.sid)
        if st.on_close:
            st.on_close(st.sid)

    def drain(self) -> int:
        self.draining = True
        return len(self._streams)

    # ---- frames --------------------------------------------------------
    def _encode(self, sid: int, kind: int, body: bytes) -> Optional[memoryview]:
        buf = self._frames.lease()  # clean: near miss, returned to the caller on success, given back when the body is too big
        if buf is None:
            return None
        if HDR.size + len(body) > len(buf):
            self._frames.unlease(buf)
            raise ValueError("frame too large")
        HDR.pack_into(buf, 0, sid, kind, len(body))
        buf[HDR.size:HDR.size + len(body)] = body
        return memoryview(buf)[:HDR.size + len(body)]

    async def _send(self, sid: int, kind: int, body: bytes) -> None:
        frame = self._encode(sid, kind, body)  # clean: given back in finally, through view.obj
        if frame is None:
            self._w.write(HDR.pack(sid, kind, len(body)) + body)
            await self._w.drain()
            return
        try:
            self._w.write(frame)
            await self._w.drain()
        finally:
            self._frames.unlease(frame.obj)

    def ping(self) -> None:
        frame = self._encode(0, DATA, b"ping")  # leak: the frame is copied to bytes and dropped
        if frame is not None:
            self._w.write(bytes(frame))

    # ---- calls ---------------------------------------------------------
    async def unary(self, body: bytes, timeout: float) -> bytes:
        st = await self.open_wait()  # clean: closed in finally
        try:
            await self._send(st.sid, END, body)
            kind, reply = await asyncio.wait_for(st.inbox.get(), timeout)
            if kind == RST:
                raise PeerReset(st.sid)
            return reply
        finally:
            self.close_stream(st)

    async def notify(self, body: bytes) -> bool:
        st = self.open()  # leak: the stream stays open when the peer does not confirm in time
        if st is None:
            return False
        await self._send(st.sid, END, body)
        try:
            await asyncio.wait_for(st.inbox.get(), 0.25)
        except asyncio.TimeoutError:
            return False
        self.close_stream(st)
        return True

    async def server_stream(self, body: bytes) -> AsyncIterator[bytes]:
        st = await self.open_wait()  # clean: near miss, the generator's finally closes, also when the reader stops early
        try:
            await self._send(st.sid, DATA, body)
            while True:
                kind, part = await st.inbox.get()
                if kind == RST:
                    raise PeerReset(st.sid)
                yield part
                if kind == END:
                    return
        finally:
            self.close_stream(st)

    async def race(self, body: bytes, n: int = 2) -> Optional[bytes]:
        legs = []
        for _ in range(n):
            st = self.open()  # leak: only the winner is closed, the other legs are forgotten
            if st is not None:
                await self._send(st.sid, END, body)
                legs.append(st)
        if not legs:
            return None
        gets = {asyncio.ensure_future(st.inbox.get()): st for st in legs}
        done, pending = await asyncio.wait(gets, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        winner = done.pop()
        self.close_stream(gets[winner])
        return winner.result()[1]
