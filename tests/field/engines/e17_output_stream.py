"""Streaming of generated chunks to clients through reusable frame buffers."""
from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import AsyncGenerator, Callable, Generator, Iterable, Optional

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Frame:
    capacity: int
    data: bytearray = field(default_factory=bytearray)
    seq: int = -1

    def fill(self, payload: bytes, seq: int) -> None:
        self.data[:] = payload[: self.capacity]
        self.seq = seq


class FramePool:
    """Frames in a deque. ``obtain`` may be refused, ``recycle`` never is."""

    def __init__(self, count: int, capacity: int) -> None:
        self._ready: deque[Frame] = deque(Frame(capacity) for _ in range(count))
        self._waiters: deque[asyncio.Future[Frame]] = deque()

    def obtain(self) -> Optional[Frame]:
        if self._ready:
            return self._ready.popleft()  # clean: returned
        return None

    async def obtain_wait(self) -> Frame:
        frame = self.obtain()  # clean: near miss, when None a recycled frame comes through the future instead
        if frame is not None:
            return frame
        fut: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._waiters.append(fut)
        return await fut

    def recycle(self, frame: Frame) -> None:
        frame.seq = -1
        while self._waiters:
            fut = self._waiters.popleft()
            if not fut.done():
                fut.set_result(frame)
                return
        self._ready.append(frame)


def frames_of(pool: FramePool, payloads: Iterable[bytes]) -> Generator[Frame, None, None]:
    """Lend out one frame at a time; it goes back when the next is asked for."""
    for seq, payload in enumerate(payloads):
        frame = pool.obtain()  # clean: near miss, a consumer that stops early closes the generator into the finally
        if frame is None:
            return
        try:
            frame.fill(payload, seq)
            yield frame
        finally:
            pool.recycle(frame)


def lines_of(pool: FramePool, payloads: Iterable[bytes]) -> Generator[bytes, None, None]:
    """Split payloads into lines, reusing one frame as the carry."""
    carry = pool.obtain()  # leak: the return at the end-of-stream marker skips the recycle
    if carry is None:
        return
    rest = b""
    for seq, payload in enumerate(payloads):
        if payload == b"[DONE]":
            if rest:
                yield rest
            return
        carry.fill(rest + payload, seq)
        *lines, rest = bytes(carry.data).split(b"\n")
        yield from lines
    pool.recycle(carry)


class ClientStream:
    """Per-client window of frames that were sent and not acknowledged."""

    def __init__(self, pool: FramePool, send: Callable[[Frame], bool], window: int) -> None:
        self.pool = pool
        self.send = send
        self.window = window
        self._unacked: dict[int, Frame] = {}
        self._last: Optional[Frame] = None
        self._next = 0

    def push(self, payload: bytes) -> bool:
        if len(self._unacked) >= self.window:
            return False
        frame = self.pool.obtain()  # clean: near miss, sequence numbers are fresh so the table never overwrites
        if frame is None:
            return False
        frame.fill(payload, self._next)
        if not self.send(frame):
            self.pool.recycle(frame)
            return False
        self._unacked[self._next] = frame
        self._next += 1
        return True

    def ack(self, upto: int) -> int:
        done = [seq for seq in self._unacked if seq <= upto]
        for seq in done:
            self.pool.recycle(self._unacked.pop(seq))
        return len(done)

    def push_final(self, payload: bytes) -> bool:
        """Send the closing frame, kept for resends until ``close``."""
        if self._last is not None:
            return True
        frame = self.pool.obtain()  # leak: close recycles the window and forgets the closing frame
        if frame is None:
            return False
        frame.fill(payload, self._next)
        self._last = frame
        return self.send(frame)

    def close(self) -> None:
        for frame in self._unacked.values():
            self.pool.recycle(frame)
        self._unacked.clear()


class Broadcaster:
    """Fans payloads out to many streams."""

    def __init__(self, pool: FramePool) -> None:
        self.pool = pool
        self._backlog: deque[Frame] = deque(maxlen=64)

    async def announce(self, payload: bytes, senders: list[Callable[[Frame], bool]]) -> int:
        frame = await self.pool.obtain_wait()  # clean: recycled after the loop, which only breaks
        frame.fill(payload, 0)
        reached = 0
        for send in senders:
            if not send(frame):
                break
            reached += 1
        self.pool.recycle(frame)
        return reached

    async def remember(self, payload: bytes) -> None:
        """Keep the newest payloads for late joiners."""
        frame = await self.pool.obtain_wait()  # leak: the bounded deque pushes its oldest frame out unrecycled
        frame.fill(payload, len(self._backlog))
        self._backlog.append(frame)

    async def replay(self, send: Callable[[Frame], bool]) -> AsyncGenerator[int, None]:
        for frame in list(self._backlog):
            if send(frame):
                yield frame.seq

    def forget(self) -> None:
        while self._backlog:
            self.pool.recycle(self._backlog.popleft())


async def pump(pool: FramePool, source: AsyncGenerator[bytes, None], out: "asyncio.Queue[Frame]") -> int:
    """Move payloads into the queue until the source ends."""
    count = 0
    async for payload in source:
        frame = await pool.obtain_wait()  # clean: near miss, an empty payload recycles before the continue, else the queue has it
        if not payload:
            pool.recycle(frame)
            continue
        frame.fill(payload, count)
        await out.put(frame)
        count += 1
    return count


async def consume(pool: FramePool, inbox: "asyncio.Queue[Frame]", n: int) -> bytes:
    """Join the next ``n`` frames of a queue filled by ``pump``."""
    body = bytearray()
    for _ in range(n):
        frame = await inbox.get()
        body += frame.data
        pool.recycle(frame)
    return bytes(body)
