# take: await P.acquire()
# give: P.release(X)
# gets: value
import asyncio


class Pool:
    def __init__(self, conns):
        self._idle = asyncio.Queue()
        for c in conns:
            self._idle.put_nowait(c)
    async def acquire(self):
        return await self._idle.get()

    def release(self, conn):
        self._idle.put_nowait(conn)
