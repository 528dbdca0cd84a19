"""Async HTTP-less front end: bounded concurrency, one stream slot per generation."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import AsyncIterator, Dict, List, Optional

log = logging.getLogger(__name__)


@dataclass
class StreamSlot:
    index: int
    queue: "asyncio.Queue[Optional[str]]" = field(default_factory=asyncio.Queue)


class StreamSlots:
    def __init__(self, n: int) -> None:
        self._idle: List[StreamSlot] = [StreamSlot(i) for i in range(n)]
        self._cond = asyncio.Condition()

    async def checkout(self) -> StreamSlot:
        async with self._cond:
            while not self._idle:
                await self._cond.wait()
            return self._idle.pop()

    async def checkin(self, slot: StreamSlot) -> None:
        async with self._cond:
            while not slot.queue.empty():
                slot.queue.get_nowait()
            self._idle.append(slot)
            self._cond.notify()

    @contextlib.asynccontextmanager
    async def leased(self) -> AsyncIterator[StreamSlot]:
        slot = await self.checkout()  # clean: checked in when the block ends
        try:
            yield slot
        finally:
            await self.checkin(slot)


class Backend:
    async def submit(self, prompt: str, slot: StreamSlot) -> bool:
        if not prompt:
            return False
        for w in prompt.split():
            await slot.queue.put(w)
        await slot.queue.put(None)
        return True


class Frontend:
    def __init__(self, slots: StreamSlots, backend: Backend, limit: int) -> None:
        self.slots = slots
        self.backend = backend
        self.sem = asyncio.Semaphore(limit)
        self.sessions: Dict[str, StreamSlot] = {}
        self.exclusive: Dict[str, StreamSlot] = {}

    async def generate(self, prompt: str) -> List[str]:
        await self.sem.acquire()  # clean: released in the finally
        try:
            async with self.slots.leased() as slot:  # clean: context manager
                await self.backend.submit(prompt, slot)
                words: List[str] = []
                while (w := await slot.queue.get()) is not None:
                    words.append(w)
                return words
        finally:
            self.sem.release()

    async def generate_validated(self, prompt: str, max_chars: int) -> List[str]:
        await self.sem.acquire()  # leak: too long a prompt raises before the release
        if len(prompt) > max_chars:
            raise ValueError("prompt too long")
        words = await self.generate_inner(prompt)
        self.sem.release()
        return words

    async def generate_inner(self, prompt: str) -> List[str]:
        slot = await self.slots.checkout()  # leak: a refused prompt returns with the slot checked out
        if not await self.backend.submit(prompt, slot):
            log.info("prompt refused")
            return []
        out: List[str] = []
        while True:
            w = await slot.queue.get()
            if w is None:
                break
            out.append(w)
        await self.slots.checkin(slot)
        return out

    async def stream(self, prompt: str) -> AsyncIterator[str]:
        slot = await self.slots.checkout()  # clean: the generator checks it in, also when it is closed early
        try:
            await self.backend.submit(prompt, slot)
            while (w := await slot.queue.get()) is not None:
                yield w
        finally:
            await self.slots.checkin(slot)

    async def try_generate(self, prompt: str) -> Optional[List[str]]:
        if self.sem.locked():
            return None
        await self.sem.acquire()  # clean: near miss, both exits release
        slot = await self.slots.checkout()  # clean: near miss, both exits check in
        ok = await self.backend.submit(prompt, slot)
        if not ok:
            await self.slots.checkin(slot)
            self.sem.release()
            return None
        words = []
        while (w := await slot.queue.get()) is not None:
            words.append(w)
        await self.slots.checkin(slot)
        self.sem.release()
        return words

    async def open_session(self, sid: str) -> StreamSlot:
        slot = await self.slots.checkout()  # clean: near miss, checked in again when the session has one already
        current = self.sessions.get(sid)
        if current is not None:
            await self.slots.checkin(slot)
            return current
        self.sessions[sid] = slot
        return slot

    async def open_exclusive(self, sid: str) -> StreamSlot:
        slot = await self.slots.checkout()  # leak: the slot already held under this id is overwritten
        self.exclusive[sid] = slot
        return slot

    async def migrate(self, sid: str, prompt: str) -> bool:
        fresh = await self.slots.checkout()  # leak: the handler swallows the error and forgets the fresh slot
        try:
            await self.backend.submit(prompt, fresh)
            old = self.sessions.pop(sid)
        except KeyError:
            log.warning("session %s is gone", sid)
            return False
        await self.slots.checkin(old)
        self.sessions[sid] = fresh
        return True

    async def close_exclusive(self, sid: str) -> None:
        slot = self.exclusive.pop(sid, None)
        if slot is not None:
            await self.slots.checkin(slot)

    async def close_session(self, sid: str) -> None:
        slot = self.sessions.pop(sid, None)
        if slot is not None:
            await self.slots.checkin(slot)
