# take: await P.wait_for_slot()
# give: await P.hand_back(X)
# gets: value
class Pool:
    def __init__(self, count):
        self._slots = list(range(count))
        self._cond = asyncio.Condition()

    async def wait_for_slot(self):
        async with self._cond:
            while not self._slots:
                await self._cond.wait()
            return self._slots.pop()

    async def hand_back(self, slot):
        async with self._cond:
            self._slots.append(slot)
            self._cond.notify()
