"""Async front of a decode engine: slots for streams, permits for parallel samples."""
from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

log = logging.getLogger("stream")


class DecodeSlots:
    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._waiters: deque[asyncio.Future[int]] = deque()

    async def claim(self) -> int:
        if self._free:
            return self._free.pop()
        fut: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters.append(fut)
        return await fut

    def claim_nowait(self) -> int | None:
        return self._free.pop() if self._free else None

    def vacate(self, slot: int) -> None:
        while self._waiters:
            fut = self._waiters.popleft()
            if not fut.done():
                fut.set_result(slot)
                return
        self._free.append(slot)


@dataclass
class Chunk:
    text: str
    reason: str | None = None


class StreamScope:
    def __init__(self, slots: DecodeSlots, name: str) -> None:
        self._slots = slots
        self._name = name
        self.slot = -1
        self.sent = 0

    async def __aenter__(self) -> "StreamScope":
        self.slot = await self._slots.claim()  # leak: __aexit__ returns before vacate where nothing was sent
        return self

    async def __aexit__(self, exc_type, exc, tb) -> bool:
        if self.sent == 0:
            log.warning("%s: nothing was streamed", self._name)
            return False
        log.info("%s: %d chunks", self._name, self.sent)
        self._slots.vacate(self.slot)
        return False


class BatchScope:
    def __init__(self, slots: DecodeSlots, name: str) -> None:
        self._slots = slots
        self._name = name
        self.slot = -1
        self.sent = 0

    async def __aenter__(self) -> "BatchScope":
        self.slot = await self._slots.claim()  # clean: near miss, __aexit__ only logs under the condition
        return self

    async def __aexit__(self, exc_type, exc, tb) -> bool:
        if self.sent == 0:
            log.warning("%s: nothing was streamed", self._name)
        self._slots.vacate(self.slot)
        if exc_type is None:
            return False
        log.info("%s: ended by %s", self._name, exc_type.__name__)
        return exc_type is asyncio.CancelledError


class Engine:
    async def generate(self, slot: int, prompt: str) -> AsyncIterator[Chunk]:
        for word in prompt.split():
            await asyncio.sleep(0)
            yield Chunk(word)
        yield Chunk("", "length" if len(prompt) > 4096 else "stop")

    async def embed(self, slot: int, text: str) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(text))]


class Connection:
    def __init__(self) -> None:
        self.open = True
        self.lines: list[str] = []

    async def send(self, text: str) -> bool:
        if self.open:
            self.lines.append(text)
        return self.open


class Server:
    def __init__(self, engine: Engine, slots: DecodeSlots, samples: int) -> None:
        self.engine = engine
        self.slots = slots
        self._permits = asyncio.Semaphore(samples)
        self._tasks: set[asyncio.Task] = set()
        self.cancelled = 0
        self.failed = 0

    async def stream(self, conn: Connection, prompt: str) -> int:
        slot = await self.slots.claim()  # leak: vacated on "stop" alone, a stream cut at "length" keeps it
        sent = 0
        async for chunk in self.engine.generate(slot, prompt):
            if chunk.reason == "stop":
                self.slots.vacate(slot)
                break
            if chunk.reason == "length":
                await conn.send("[cut]")
                break
            await conn.send(chunk.text)
            sent += 1
        return sent

    async def stream_checked(self, conn: Connection, prompt: str) -> bool:
        slot = await self.slots.claim()  # leak: a closed connection returns False with the slot
        async for chunk in self.engine.generate(slot, prompt):
            if not await conn.send(chunk.text):
                log.info("client went away")
                return False
        self.slots.vacate(slot)
        return True

    async def stream_guarded(self, conn: Connection, prompt: str) -> bool:
        slot = await self.slots.claim()  # clean: near miss, finally covers the early return
        try:
            async for chunk in self.engine.generate(slot, prompt):
                if not await conn.send(chunk.text):
                    return False
            return True
        finally:
            self.slots.vacate(slot)

    async def collect(self, prompt: str) -> str:
        async with BatchScope(self.slots, "collect") as scope:  # clean: the scope vacates
            words = []
            async for chunk in self.engine.generate(scope.slot, prompt):
                words.append(chunk.text)
                scope.sent += 1
        return " ".join(words)

    def start_embed(self, text: str) -> asyncio.Task | None:
        slot = self.slots.claim_nowait()  # leak: the done callback returns early for a cancelled task
        if slot is None:
            return None
        task = asyncio.ensure_future(self.engine.embed(slot, text))
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._embed_done, slot))
        return task

    def _embed_done(self, slot: int, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            self.cancelled += 1
            return
        if task.exception() is not None:
            self.failed += 1
        self.slots.vacate(slot)

    def start_score(self, text: str) -> asyncio.Task | None:
        slot = self.slots.claim_nowait()  # clean: near miss, the callback vacates first and counts after
        if slot is None:
            return None
        task = asyncio.ensure_future(self.engine.embed(slot, text))
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._score_done, slot))
        return task

    def _score_done(self, slot: int, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        self.slots.vacate(slot)
        if task.cancelled():
            self.cancelled += 1
            return
        if task.exception() is not None:
            self.failed += 1

    async def best_of(self, prompt: str, n: int) -> str:
        for _ in range(n):
            await self._permits.acquire()  # leak: n permits are taken and one is given back
        results = await asyncio.gather(*(self.collect(prompt) for _ in range(n)), return_exceptions=True)
        self._permits.release()
        texts = [r for r in results if isinstance(r, str)]
        return max(texts, key=len, default="")

    async def all_of(self, prompt: str, n: int) -> list[str]:
        for _ in range(n):
            await self._permits.acquire()  # clean: near miss, released n times
        results = await asyncio.gather(*(self.collect(prompt) for _ in range(n)), return_exceptions=True)
        for _ in range(n):
            self._permits.release()
        return [r for r in results if isinstance(r, str)]
