import asyncio


class Scratch:
    def __init__(self, size):
        self.size = size
        self.used = 0


class ScratchPool:
    def __init__(self, count, size):
        self._store = [Scratch(size) for _ in range(count)]
        self._cond = asyncio.Condition()

    async def draw(self):
        async with self._cond:
            await self._cond.wait_for(lambda: self._store)
            return self._store.pop()

    async def replenish(self, scratch):
        async with self._cond:
            scratch.used = 0
            self._store.append(scratch)
            self._cond.notify()


class Pipeline:
    def __init__(self, pool, depth):
        self.pool = pool
        self.decoded = asyncio.Queue(depth)
        self.encoded = asyncio.Queue(depth)
        self.running = True

    async def decode(self, packets):
        for packet in packets:
            scratch = await self.pool.draw()  # leak: stop empties the decoded queue without replenish
            scratch.used = len(packet)
            await self.decoded.put((packet, scratch))

    async def render(self, draw_frame):
        while self.running:
            packet, scratch = await self.decoded.get()
            draw_frame(packet)
            await self.pool.replenish(scratch)

    async def encode(self, frames):
        for frame in frames:
            scratch = await self.pool.draw()  # clean: sender and stop give back what is queued
            scratch.used = len(frame)
            await self.encoded.put((frame, scratch))

    async def send(self, writer):
        while self.running:
            frame, scratch = await self.encoded.get()
            writer.write(frame)
            await self.pool.replenish(scratch)

    async def stop(self):
        self.running = False
        while not self.decoded.empty():
            self.decoded.get_nowait()
        while not self.encoded.empty():
            _, scratch = self.encoded.get_nowait()
            await self.pool.replenish(scratch)


class Overlay:
    def __init__(self, pool):
        self.pool = pool
        self.text = ""
        self.scratch = None

    async def show(self, text):
        if self.scratch is None:
            self.scratch = await self.pool.draw()  # leak: hide gives back only when there is text
        self.text = text

    async def hide(self):
        scratch, self.scratch = self.scratch, None
        if scratch is not None and self.text:
            await self.pool.replenish(scratch)
            self.text = ""
