"""Render workers in an asyncio service."""
import asyncio


class WorkerBench:
    def __init__(self, workers):
        self._resting = set(workers)
        self._cond = asyncio.Condition()

    async def call_in(self):
        async with self._cond:
            await self._cond.wait_for(lambda: self._resting)
            return self._resting.pop()

    async def send_home(self, worker):
        async with self._cond:
            self._resting.add(worker)
            self._cond.notify()


class RenderService:
    def __init__(self, bench):
        self.bench = bench
        self.cache = {}

    async def render(self, scene):
        worker = await self.bench.call_in()  # clean: sent home in finally
        try:
            return await worker.run("render", scene)
        finally:
            await self.bench.send_home(worker)

    async def thumbnail(self, scene_id):
        worker = await self.bench.call_in()  # leak: a cached picture returns with the worker still called in
        if scene_id in self.cache:
            return self.cache[scene_id]
        image = await worker.run("thumb", scene_id)
        self.cache[scene_id] = image
        await self.bench.send_home(worker)
        return image

    async def race(self, scene):
        a = await self.bench.call_in()  # clean: sent home below
        b = await self.bench.call_in()  # leak: the second worker is never sent home
        tasks = [asyncio.create_task(w.run("render", scene)) for w in (a, b)]
        done, _ = await asyncio.wait(tasks)
        await self.bench.send_home(a)
        return done.pop().result()

    async def restart_each(self, n):
        for _ in range(n):
            worker = await self.bench.call_in()  # clean: sent home every turn
            await worker.restart()
            await self.bench.send_home(worker)
