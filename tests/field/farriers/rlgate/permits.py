import asyncio
from contextlib import asynccontextmanager
from typing import AsyncIterator, Dict, Optional


class TokenBudget:
    """In-flight token budget of one inference replica."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.used = 0
        self._cv = asyncio.Condition()

    async def charge(self, n: int) -> int:
        n = min(n, self.capacity)
        async with self._cv:
            await self._cv.wait_for(lambda: self.used + n <= self.capacity)
            self.used += n
        return n

    def try_charge(self, n: int) -> bool:
        if self.used + n > self.capacity:
            return False
        self.used += n
        return True

    async def refund(self, n: int) -> None:
        async with self._cv:
            self.used -= n
            self._cv.notify_all()


class ReplicaRouter:
    def __init__(self, urls: list, per_replica: int, capacity: int):
        self._load: Dict[str, int] = {u: 0 for u in urls}
        self.per_replica = per_replica
        self.budgets = {u: TokenBudget(capacity) for u in urls}

    def pick(self) -> Optional[str]:
        url = min(self._load, key=self._load.__getitem__)
        if self._load[url] >= self.per_replica:
            return None
        self._load[url] += 1
        return url

    def unpick(self, url: str) -> None:
        self._load[url] -= 1

    async def pick_charged(self, n: int) -> Optional[str]:
        url = self.pick()  # clean: near miss, unpicked over budget, otherwise the caller's
        if url is None:
            return None
        if not self.budgets[url].try_charge(n):  # clean: the caller refunds it with the url
            self.unpick(url)
            return None
        return url

    async def give_up(self, url: str, n: int) -> None:
        self.unpick(url)
        await self.budgets[url].refund(n)

    @asynccontextmanager
    async def seat(self) -> AsyncIterator[Optional[str]]:
        url = self.pick()  # clean: near miss, unpicked in the finally
        try:
            yield url
        finally:
            if url is not None:
                self.unpick(url)
