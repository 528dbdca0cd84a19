"""Fetching KV pages from a peer with asyncio."""
import asyncio


class PageLeases:
    def __init__(self, n):
        self._pages = asyncio.Queue()
        for i in range(n):
            self._pages.put_nowait(i)

    async def lease(self):
        return await self._pages.get()

    def surrender(self, page):
        self._pages.put_nowait(page)


class Fetcher:
    def __init__(self, leases, peer):
        self.leases = leases
        self.peer = peer
        self.todo = asyncio.Queue()
        self.inflight = {}

    async def fetch(self, key):
        page = await self.leases.lease()  # clean: near miss, finally covers timeout, cancellation and return
        try:
            return await asyncio.wait_for(self.peer.read(key, page), 1.0)
        except asyncio.TimeoutError:
            return None
        finally:
            self.leases.surrender(page)

    async def fetch_or_default(self, key, default):
        page = await self.leases.lease()  # leak: the timeout handler returns the default and keeps the page
        try:
            value = await asyncio.wait_for(self.peer.read(key, page), 1.0)
        except asyncio.TimeoutError:
            return default
        except BaseException:
            self.leases.surrender(page)
            raise
        self.leases.surrender(page)
        return value

    async def enqueue(self, key):
        page = await self.leases.lease()  # clean: near miss, the worker that takes it off the queue surrenders it
        self.todo.put_nowait((key, page))

    async def worker(self):
        while True:
            key, page = await self.todo.get()
            try:
                await self.peer.read(key, page)
            except ConnectionError:
                continue
            finally:
                self.leases.surrender(page)
                self.todo.task_done()

    async def spawn(self, key):
        if key in self.inflight:
            return self.inflight[key]
        page = await self.leases.lease()  # clean: near miss, the task's done callback surrenders it, cancelled or not
        task = asyncio.ensure_future(self.peer.read(key, page))
        task.add_done_callback(lambda _t, page=page: self.leases.surrender(page))
        self.inflight[key] = task
        return task

    async def race(self, key, peers):
        for peer in peers:
            page = await self.leases.lease()  # leak: a peer that has nothing is passed over with its page
            if not await peer.has(key):
                continue
            try:
                return await peer.read(key, page)
            finally:
                self.leases.surrender(page)
        return None

    async def drain(self, keys):
        page = None
        async for key in keys:
            page = await self.leases.lease()  # leak: rebound by the next key, only the last one goes back
            await self.peer.read(key, page)
        if page is not None:
            self.leases.surrender(page)
