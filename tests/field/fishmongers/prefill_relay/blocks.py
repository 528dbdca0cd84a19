"""Device blocks of one host, by number."""
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager


class PoolEmpty(RuntimeError):
    pass


class BlockPool:
    def __init__(self, count: int, reserve: int = 4) -> None:
        self._free = list(range(count))
        self._reserve = reserve
        self._returned = asyncio.Event()

    def grab(self, n: int) -> list[int]:
        if len(self._free) - self._reserve < n:
            raise PoolEmpty(f"{n} wanted, {len(self._free)} free")
        return [self._free.pop() for _ in range(n)]  # clean: returned

    def grab_urgent(self) -> int:
        """One block out of the reserve, for a sequence that is already decoding."""
        if not self._free:
            raise PoolEmpty("the reserve is used up")
        return self._free.pop()  # clean: returned

    async def grab_wait(self, n: int, patience: float) -> list[int]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        taken: list[int] = []
        while len(taken) < n:
            self._returned.clear()
            while self._free and len(taken) < n:
                taken.append(self._free.pop())  # leak: what was gathered is lost when the patience ends and PoolEmpty is raised
            if len(taken) == n:
                break
            try:
                await asyncio.wait_for(self._returned.wait(), deadline - loop.time())
            except asyncio.TimeoutError:
                raise PoolEmpty(f"{n} wanted, {len(taken)} gathered") from None
        return taken

    def give(self, blocks: Sequence[int]) -> None:
        self._free.extend(blocks)
        self._returned.set()

    @asynccontextmanager
    async def scratch(self, n: int) -> AsyncIterator[list[int]]:
        blocks = await self.grab_wait(n, patience=1.0)  # clean: finally
        try:
            yield blocks
        finally:
            self.give(blocks)
