# take: await P.obtain()
# give: await P.relinquish(X)
# gets: value
# type: MeteredBucketClients
import asyncio
import time


class _BucketClients:
    def __init__(self, build, size):
        self._build = build
        self._parked = asyncio.LifoQueue()
        for _ in range(size):
            self._parked.put_nowait(None)   # not built yet

    async def get(self):
        client = await self._parked.get()
        if client is None:
            try:
                client = await self._build()
            except BaseException:
                self._parked.put_nowait(None)
                raise
        return client

    async def put(self, client):
        await self._parked.put(client)


class MeteredBucketClients:
    def __init__(self, build, size=8):
        self._inner = _BucketClients(build, size)
        self.waited = 0.0
        self.handed = 0

    async def obtain(self):
        t0 = time.monotonic()
        client = await self._inner.get()
        self.waited += time.monotonic() - t0
        self.handed += 1
        return client

    async def relinquish(self, client):
        await self._inner.put(client)
