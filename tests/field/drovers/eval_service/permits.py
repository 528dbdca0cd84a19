"""Permits that bound the number of code executions and of judge calls under way."""
from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import Deque
from collections import deque


class PermitGate:
    def __init__(self, limit: int):
        self.limit = limit
        self.taken = 0
        self._waiters: Deque[asyncio.Future] = deque()

    async def take(self) -> None:
        while self.taken >= self.limit:
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            await fut
        self.taken += 1

    def try_take(self) -> bool:
        if self.taken >= self.limit:
            return False
        self.taken += 1
        return True

    def give(self) -> None:
        self.taken -= 1
        while self._waiters:
            fut = self._waiters.popleft()
            if not fut.done():
                fut.set_result(None)
                break

    @asynccontextmanager
    async def permit_if(self, wanted: bool):
        if wanted:
            await self.take()  # clean: near miss, given under the same flag
        try:
            yield self
        finally:
            if wanted:
                self.give()

    @asynccontextmanager
    async def quick_permit(self):
        await self.take()  # leak: without a finally the give is skipped by a body that raises, which score_quick survives
        yield self
        self.give()
