"""Token budget of the model API. A ticket reserves an estimate and settles for what was used."""
from __future__ import annotations

import asyncio


class Ticket:
    __slots__ = ("budget", "tokens", "open")

    def __init__(self, budget: Budget, tokens: int):
        self.budget, self.tokens, self.open = budget, tokens, True

    async def settle(self, used: int) -> None:
        if self.open:
            self.open = False
            self.budget.spent += used
            await self.budget.put_back(self.tokens)


class Budget:
    def __init__(self, in_flight: int):
        self.left = self.total = in_flight
        self.spent = 0
        self._cond = asyncio.Condition()

    async def reserve(self, tokens: int) -> Ticket:
        tokens = min(tokens, self.total)
        async with self._cond:
            await self._cond.wait_for(lambda: self.left >= tokens)
            self.left -= tokens
        return Ticket(self, tokens)

    async def put_back(self, tokens: int) -> None:
        async with self._cond:
            self.left += tokens
            self._cond.notify_all()
