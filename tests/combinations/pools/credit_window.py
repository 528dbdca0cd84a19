# take: await P.spend(n)
# give: await P.replenish(n)
# gets: nothing
# type: CreditWindow
import asyncio


class CreditWindow:
    """Flow control between prefill and decode nodes: one credit is one KV page in flight."""

    def __init__(self, credits: int):
        self._initial = credits
        self._credits = credits
        self._cond = asyncio.Condition()

    def __repr__(self):
        return f"<CreditWindow {self._credits}/{self._initial}>"

    async def spend(self, n: int = 1) -> None:
        if n > self._initial:
            raise ValueError("would wait forever")
        async with self._cond:
            await self._cond.wait_for(lambda: self._credits >= n)
            self._credits -= n

    async def replenish(self, n: int = 1) -> None:
        async with self._cond:
            self._credits = min(self._initial, self._credits + n)
            self._cond.notify_all()
