"""Token streaming with send windows.

Every client stream has a window of credits; a chunk that is sent costs one and the
client's update brings it back. Chunks are built in frames from a frame bank. The
transport reports the end of each write through a callback, in the style of asyncio
protocols.
"""
import asyncio
import logging
import struct
from collections import deque
from typing import Callable, Optional

logger = logging.getLogger("stream")

DATA, END, ERROR = 1, 2, 3
FRAME_BYTES = 4096

class StreamReset(Exception):
    pass

class FrameOverflow(ValueError):
    pass

class Frame:
    __slots__ = ("buf", "size", "bank")

    def __init__(self, bank):
        self.buf = bytearray(FRAME_BYTES)
        self.size = 0
        self.bank = bank

    def write(self, kind: int, payload: bytes) -> "Frame":
        if len(payload) + 5 > FRAME_BYTES:
            raise FrameOverflow(len(payload))
        struct.pack_into("!BI", self.buf, 0, kind, len(payload))
        self.buf[5 : 5 + len(payload)] = payload
        self.size = 5 + len(payload)
        return self

    def view(self) -> memoryview:
        return memoryview(self.buf)[: self.size]

class FrameBank:
    def __init__(self, count: int):
        self._shelf = [Frame(self) for _ in range(count)]
        self._want: deque = deque()

    def fetch(self) -> Optional[Frame]:
        if self._shelf:
            return self._shelf.pop()  # clean: handed out
        return None

    async def wait_fetch(self) -> Frame:
        frame = self.fetch()  # clean: None or returned
        if frame is not None:
            return frame
        fut = asyncio.get_running_loop().create_future()
        self._want.append(fut)
        return await fut

    def stow(self, frame: Frame) -> None:
        frame.size = 0
        while self._want:
            fut = self._want.popleft()
            if not fut.done():
                fut.set_result(frame)
                return
        self._shelf.append(frame)

class Window:
    def __init__(self, credits: int):
        self.credits = credits
        self.limit = credits
        self._wake = asyncio.Event()

    async def spend(self) -> None:
        while self.credits <= 0:
            self._wake.clear()
            await self._wake.wait()
        self.credits -= 1

    def restore(self, n: int = 1) -> None:
        self.credits = min(self.limit, self.credits + n)
        self._wake.set()

class Transport:
    """Writes frames in order; on_written(ok) is called once for each of them."""

    def __init__(self, sock_writer):
        self.w = sock_writer
        self.queue: deque = deque()
        self.closing = False
        self._kick = asyncio.Event()

    def submit(self, frame: Frame, on_written: Callable[[bool], None]) -> None:
        if self.closing:
            on_written(False)
            return
        self.queue.append((frame, on_written))
        self._kick.set()

    def submit_urgent(self, frame: Frame, on_written: Callable[[bool], None]) -> bool:
        """Goes ahead of all others. Refused while the transport is closing."""
        if self.closing:
            return False
        self.queue.appendleft((frame, on_written))
        self._kick.set()
        return True

    async def pump(self) -> None:
        while not self.closing:
            while self.queue:
                frame, on_written = self.queue.popleft()
                try:
                    self.w.write(frame.view())
                    await self.w.drain()
                except ConnectionError:
                    on_written(False)
                    self.abort()
                    return
                on_written(True)
            self._kick.clear()
            await self._kick.wait()

    def abort(self) -> None:
        self.closing = True
        self._kick.set()
        while self.queue:
            _, on_written = self.queue.popleft()
            on_written(False)

class Stream:
    def __init__(self, sid: int, bank: FrameBank, transport: Transport, credits: int = 16):
        self.sid = sid
        self.bank = bank
        self.transport = transport
        self.window = Window(credits)
        self.reset = False
        self.held: Optional[Frame] = None

    async def send(self, text: str) -> None:
        await self.window.spend()  # clean: near miss, restored by the client's update or on_written, or by the handler
        frame = await self.bank.wait_fetch()  # clean: near miss, stowed by on_written, which the transport calls in every case, or by the handlers
        try:
            if self.reset:
                raise StreamReset(self.sid)
            frame.write(DATA, text.encode())
        except (StreamReset, FrameOverflow):
            self.bank.stow(frame)
            self.window.restore()
            raise

        def on_written(ok: bool) -> None:
            self.bank.stow(frame)
            if not ok:
                self.window.restore()

        self.transport.submit(frame, on_written)

    async def send_batch(self, texts) -> int:
        """Spends for the whole batch first, so that it isn't torn apart."""
        n = 0
        for _ in texts:
            await self.window.spend()  # leak: for a text that is too long the credit of its frame is not restored
        for text in texts:
            frame = await self.bank.wait_fetch()  # leak: FrameOverflow is handled by a continue that forgets the frame
            try:
                frame.write(DATA, text.encode())
            except FrameOverflow:
                logger.warning("stream %d: chunk of %d left out", self.sid, len(text))
                continue
            self.transport.submit(frame, lambda ok, f=frame: self._written(f, ok))
            n += 1
        return n

    def _written(self, frame: Frame, ok: bool) -> None:
        self.bank.stow(frame)
        if not ok:
            self.window.restore()

    def fail(self, message: str) -> None:
        frame = self.bank.fetch()  # leak: submit_urgent answers False while closing and does not call back
        if frame is None:
            return
        frame.write(ERROR, message.encode()[:200])
        self.transport.submit_urgent(frame, lambda ok: self.bank.stow(frame))

    def finish(self) -> None:
        frame = self.bank.fetch()  # clean: near miss, the refused frame is stowed here, the accepted one by the callback
        if frame is None:
            self.transport.abort()
            return
        frame.write(END, b"")
        if not self.transport.submit_urgent(frame, lambda ok: self.bank.stow(frame)):
            self.bank.stow(frame)

    def hold_header(self, payload: bytes) -> None:
        """The header goes out with the first token; it may be set again until then."""
        frame = self.bank.fetch()  # leak: setting the header again rebinds self.held with the earlier frame in it
        if frame is None:
            return
        self.held = frame.write(DATA, payload[:512])

    def flush_header(self) -> None:
        if self.held is not None:
            frame, self.held = self.held, None
            self.transport.submit(frame, lambda ok: self.bank.stow(frame))

    def close(self) -> None:
        self.reset = True
        self.flush_header()

class Server:
    def __init__(self, bank: FrameBank):
        self.bank = bank
        self.streams = {}

    def open(self, sid: int, transport: Transport) -> Stream:
        stream = self.streams[sid] = Stream(sid, self.bank, transport)
        return stream

    def on_update(self, sid: int, credits: int) -> None:
        stream = self.streams.get(sid)
        if stream is not None:
            stream.window.restore(credits)

    async def serve(self, sid: int, transport: Transport, tokens) -> None:
        stream = self.open(sid, transport)  # clean: closed and taken out of the table in the finally
        try:
            stream.hold_header(b"model=" + tokens.model.encode())
            async for tok in tokens:
                stream.flush_header()
                await stream.send(tok)
            stream.finish()
        except StreamReset:
            logger.info("stream %d was reset", sid)
        except FrameOverflow as exc:
            stream.fail(f"chunk of {exc} bytes")
        finally:
            stream.close()
            self.streams.pop(sid, None)

    async def heartbeat(self, period: float) -> None:
        while True:
            await asyncio.sleep(period)
            frame = await self.bank.wait_fetch()  # leak: with no streams the round ends without a submit and the frame is not stowed
            frame.write(DATA, b"\0")
            targets = [s.transport for s in self.streams.values()]
            if not targets:
                continue
            left = [len(targets)]

            def on_written(ok, frame=frame, left=left):
                left[0] -= 1
                if left[0] == 0:
                    self.bank.stow(frame)

            for tr in targets:
                tr.submit(frame, on_written)
