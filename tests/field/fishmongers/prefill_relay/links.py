"""The send window to one decode host, counted in blocks."""
from __future__ import annotations

import asyncio
from collections import deque


class LinkDown(ConnectionError):
    pass


class Link:
    def __init__(self, host: str, window: int, wire) -> None:
        self.host = host
        self._credits = window
        self._wire = wire
        self._waiters: deque[asyncio.Future[None]] = deque()
        self.down = False

    def try_take(self, n: int) -> bool:
        if self.down or self._credits < n:
            return False
        self._credits -= n
        return True

    async def take(self, n: int) -> None:
        while not self.try_take(n):  # clean: the credits are the caller's when it returns
            if self.down:
                raise LinkDown(self.host)
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def refund(self, n: int) -> None:
        self._credits += n
        self._wake()

    def fail(self) -> None:
        self.down = True
        self._wake()

    def _wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    async def write(self, request: str, src: list[int], dst: list[int]) -> None:
        if self.down:
            raise LinkDown(self.host)
        await self._wire.put(request, list(zip(src, dst)))

    async def round_trip(self) -> float:
        loop = asyncio.get_running_loop()
        started = loop.time()
        await self.take(1)  # clean: finally
        try:
            await self.write("ping", [], [])
        finally:
            self.refund(1)
        return loop.time() - started
