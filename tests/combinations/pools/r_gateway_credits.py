# take: await P.draw(n)
# give: await P.repay(n)
# gets: nothing
# type: CreditWindow
import asyncio


class CreditWindow:
    def __init__(self, limit):
        self.limit = limit
        self.outstanding = 0
        self.peak = 0
        self._room = asyncio.Condition()

    def _fits(self, amount):
        return self.outstanding + amount <= self.limit

    async def draw(self, amount):
        if amount > self.limit:
            raise ValueError(f"{amount} credits can never fit a window of {self.limit}")
        async with self._room:
            await self._room.wait_for(lambda: self._fits(amount))
            self.outstanding += amount
            self.peak = max(self.peak, self.outstanding)

    async def repay(self, amount):
        async with self._room:
            if amount > self.outstanding:
                raise ValueError("repaid more than was drawn")
            self.outstanding -= amount
            self._room.notify_all()
