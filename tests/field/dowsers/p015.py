"""Decode slots for asyncio requests; waiters are futures."""
import asyncio
from collections import deque


class SlotQueue:
    def __init__(self, count):
        self._slots = list(range(count))
        self._waiters = deque()

    async def get_slot(self):
        if self._slots and not self._waiters:
            return self._slots.pop()
        fut = asyncio.get_running_loop().create_future()
        self._waiters.append(fut)
        return await fut

    def put_slot(self, slot):
        while self._waiters:
            fut = self._waiters.popleft()
            if not fut.done():
                fut.set_result(slot)
                return
        self._slots.append(slot)


class Frontend:
    def __init__(self, queue: SlotQueue, engine):
        self.queue = queue
        self.engine = engine

    async def complete(self, prompt):
        slot = await self.queue.get_slot()  # clean: put back in finally
        try:
            return await self.engine.generate(slot, prompt)
        finally:
            self.queue.put_slot(slot)

    async def embed(self, text):
        slot = await self.queue.get_slot()  # leak: an empty text returns with the slot
        if not text:
            return []
        vec = await self.engine.embed(slot, text)
        self.queue.put_slot(slot)
        return vec

    async def stream(self, prompt, send):
        slot = await self.queue.get_slot()  # clean: the loop's end and its break both reach put_slot
        async for token in self.engine.tokens(slot, prompt):
            if not await send(token):
                break
        self.queue.put_slot(slot)

    async def beam(self, prompt, width):
        best = None
        for _ in range(width):
            slot = await self.queue.get_slot()  # leak: break on the first good beam keeps the slot
            best = await self.engine.generate(slot, prompt)
            if best.score > 0.9:
                break
            self.queue.put_slot(slot)
        return best
