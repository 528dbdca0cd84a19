"""GPU stream sharing in an asynchronous inference server."""
import asyncio
from contextlib import asynccontextmanager


class StreamPool:
    def __init__(self, streams):
        self._ready = asyncio.LifoQueue()
        for stream in streams:
            self._ready.put_nowait(stream)

    async def get_stream(self):
        return await self._ready.get()

    def return_stream(self, stream):
        self._ready.put_nowait(stream)


@asynccontextmanager
async def on_stream(pool):
    stream = await pool.get_stream()  # clean: returned after the block
    try:
        yield stream
    finally:
        pool.return_stream(stream)


class InferenceServer:
    def __init__(self, pool, model):
        self.pool = pool
        self.model = model
        self.tasks = set()
        self.latency = []

    async def infer(self, batch):
        async with on_stream(self.pool) as stream:  # clean: the context manager returns it
            if not batch:
                return []
            return await self.model.forward(batch, stream)

    async def _background(self, stream, batch):
        try:
            self.latency.append(await self.model.profile(batch, stream))
        finally:
            self.pool.return_stream(stream)

    async def _trace(self, stream, batch):
        trace = await self.model.trace(batch, stream)
        self.latency.append(trace.total)

    async def profile(self, batch):
        stream = await self.pool.get_stream()  # clean: the task returns it
        task = asyncio.create_task(self._background(stream, batch))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def trace(self, batch):
        stream = await self.pool.get_stream()  # leak: the task traces and forgets it
        task = asyncio.create_task(self._trace(stream, batch))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def infer_split(self, left, right):
        streams = await asyncio.gather(self.pool.get_stream(), self.pool.get_stream())  # leak: only the first
        a = await self.model.forward(left, streams[0])
        b = await self.model.forward(right, streams[1])
        self.pool.return_stream(streams[0])
        return a + b

    async def warm(self):
        async with on_stream(self.pool) as first, on_stream(self.pool) as second:  # clean: both exit
            await self.model.copy(first, second)
