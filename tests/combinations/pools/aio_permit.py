# take: await P.take_permit()
# give: P.return_permit()
# gets: nothing
class Pool:
    def __init__(self, permits):
        self._permits = permits
        self._wake = asyncio.Event()

    async def take_permit(self):
        while self._permits <= 0:
            self._wake.clear()
            await self._wake.wait()
        self._permits -= 1

    def return_permit(self):
        self._permits += 1
        self._wake.set()
