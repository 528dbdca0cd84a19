"""asyncio producer/consumer stages handing credit-backed messages along."""
from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Any, Awaitable, Callable

logger = logging.getLogger(__name__)

STOP = object()


class Credits:
    """Back-pressure: one credit per message in the pipeline."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._cv = asyncio.Condition()

    async def borrow_credit(self) -> int:
        async with self._cv:
            await self._cv.wait_for(lambda: self._n > 0)
            self._n -= 1
            return self._n

    def try_borrow_credit(self) -> bool:
        if self._n == 0:
            return False
        self._n -= 1
        return True

    async def repay_credit(self, k: int = 1) -> None:
        async with self._cv:
            self._n += k
            self._cv.notify(k)


class ByteArrays:
    def __init__(self, n: int, size: int) -> None:
        self.size = size
        self.free: asyncio.Queue[bytearray] = asyncio.Queue()
        for _ in range(n):
            self.free.put_nowait(bytearray(size))

    async def get_bytes(self) -> bytearray:
        return await self.free.get()  # clean: handed out

    def put_bytes(self, b: bytearray) -> None:
        self.free.put_nowait(b)


@dataclasses.dataclass
class Message:
    key: str
    data: bytearray
    length: int = 0


Sink = Callable[[str, bytes], Awaitable[None]]


class Pipeline:
    def __init__(self, credits: Credits, bufs: ByteArrays, sink: Sink) -> None:
        self.credits = credits
        self.bufs = bufs
        self.sink = sink
        self.q: asyncio.Queue[Any] = asyncio.Queue()

    async def produce(self, key: str, payload: bytes) -> bool:
        if len(payload) > self.bufs.size:
            return False
        await self.credits.borrow_credit()  # clean: consume() repays one per message
        buf = await self.bufs.get_bytes()  # clean: rides in the message, consume() puts it back
        buf[: len(payload)] = payload
        await self.q.put(Message(key, buf, len(payload)))
        return True

    async def produce_nowait(self, key: str, payload: bytes) -> bool:
        if not self.credits.try_borrow_credit():  # leak: an over-long payload returns False with the credit gone
            return False
        if len(payload) > self.bufs.size:
            logger.warning("%s: payload too long", key)
            return False
        buf = await self.bufs.get_bytes()  # clean: in the message
        buf[: len(payload)] = payload
        self.q.put_nowait(Message(key, buf, len(payload)))
        return True

    async def consume(self) -> int:
        n = 0
        while True:
            msg = await self.q.get()
            if msg is STOP:
                return n
            try:
                await self.sink(msg.key, bytes(msg.data[: msg.length]))
                n += 1
            finally:
                self.bufs.put_bytes(msg.data)
                await self.credits.repay_credit()

    async def bypass(self, key: str, payload: bytes) -> None:
        buf = await self.bufs.get_bytes()  # leak: only bytes copied out of it are kept
        buf[: len(payload)] = payload
        await self.sink(key, bytes(buf[: len(payload)]))

    async def bypass_upper(self, key: str, payload: bytes) -> None:
        buf = await self.bufs.get_bytes()  # leak: upper() makes a new bytearray, the new one is put back
        buf[: len(payload)] = payload
        buf = buf.upper()
        await self.sink(key, bytes(buf[: len(payload)]))
        self.bufs.put_bytes(buf)

    async def direct(self, key: str, payload: bytes) -> bool:
        buf = await self.bufs.get_bytes()  # clean: near miss, return inside try, put back in finally
        try:
            if len(payload) > len(buf):
                return False
            buf[: len(payload)] = payload
            await self.sink(key, bytes(buf[: len(payload)]))
            return True
        finally:
            self.bufs.put_bytes(buf)

    async def fan_out(self, key: str, payload: bytes, sinks: list[Sink]) -> int:
        ok = 0
        for s in sinks:
            await self.credits.borrow_credit()  # leak: the ConnectionError handler goes to the next sink without repaying
            try:
                await s(key, payload)
            except ConnectionError:
                logger.info("sink lost")
                continue
            await self.credits.repay_credit()
            ok += 1
        return ok

    async def fan_out_counted(self, key: str, payload: bytes, sinks: list[Sink]) -> int:
        borrowed = 0
        for s in sinks:
            await self.credits.borrow_credit()  # clean: near miss, counted before the handler and repaid as one sum
            borrowed += 1
            try:
                await s(key, payload)
            except ConnectionError:
                continue
        await self.credits.repay_credit(borrowed)
        return borrowed

    async def drain_to(self, out: list[bytes]) -> None:
        while not self.q.empty():
            msg = self.q.get_nowait()
            if msg is STOP:
                break
            out.append(bytes(msg.data[: msg.length]))
            self.bufs.put_bytes(msg.data)
            await self.credits.repay_credit()

    async def stop(self) -> None:
        await self.q.put(STOP)


class Coalescer:
    def __init__(self, bufs: ByteArrays) -> None:
        self.bufs = bufs
        self.open: dict[str, Message] = {}

    async def add(self, key: str, payload: bytes) -> Message:
        msg = self.open.get(key)
        if msg is None:
            msg = Message(key, await self.bufs.get_bytes())  # leak: expire() deletes the entries of idle keys without putting their bytes back
            self.open[key] = msg
        msg.data[msg.length : msg.length + len(payload)] = payload
        msg.length += len(payload)
        return msg

    async def seal(self, key: str) -> bytes:
        msg = self.open.pop(key)
        out = bytes(msg.data[: msg.length])
        self.bufs.put_bytes(msg.data)
        return out

    def expire(self, idle: list[str]) -> None:
        for key in idle:
            if key in self.open:
                del self.open[key]


async def with_task(p: Pipeline, payload: bytes) -> asyncio.Task[None]:
    buf = await p.bufs.get_bytes()  # clean: near miss, the task puts it back
    buf[: len(payload)] = payload

    async def send() -> None:
        try:
            await p.sink("task", bytes(buf[: len(payload)]))
        finally:
            p.bufs.put_bytes(buf)

    return asyncio.create_task(send())


async def with_task_unless_empty(p: Pipeline, payload: bytes) -> asyncio.Task[None] | None:
    buf = await p.bufs.get_bytes()  # leak: an empty payload creates no task and nobody puts it back
    if not payload:
        return None
    buf[: len(payload)] = payload

    async def send() -> None:
        try:
            await p.sink("task", bytes(buf[: len(payload)]))
        finally:
            p.bufs.put_bytes(buf)

    return asyncio.create_task(send())
