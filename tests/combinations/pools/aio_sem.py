# take: await P.enter()
# give: P.leave()
# gets: nothing
class Pool:
    def __init__(self, limit):
        self._sem = asyncio.Semaphore(limit)
        self.active = 0

    async def enter(self):
        await self._sem.acquire()
        self.active += 1

    def leave(self):
        self.active -= 1
        self._sem.release()
