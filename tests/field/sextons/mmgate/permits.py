from __future__ import annotations

import asyncio
from collections import deque


class ByteBudget:
    """Bytes of decoded media that may be alive at a time."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.left = total
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    def try_reserve(self, n: int) -> bool:
        if n > self.left or self._waiters:
            return False
        self.left -= n
        return True

    async def reserve(self, n: int) -> None:
        if n <= self.left and not self._waiters:
            self.left -= n
            return
        fut: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (n, fut)
        self._waiters.append(entry)
        try:
            await fut
        except asyncio.CancelledError:
            if fut.done() and not fut.cancelled():
                self.refund(n)
            elif entry in self._waiters:
                self._waiters.remove(entry)
            raise

    def refund(self, n: int) -> None:
        self.left += n
        while self._waiters and self._waiters[0][0] <= self.left:
            need, fut = self._waiters.popleft()
            if fut.done():
                continue
            self.left -= need
            fut.set_result(None)


class EncoderRing:
    def __init__(self, n: int) -> None:
        self._idle: asyncio.Queue[int] = asyncio.Queue()
        for i in range(n):
            self._idle.put_nowait(i)

    async def seize(self) -> int:
        return await self._idle.get()

    def seize_nowait(self) -> int | None:
        try:
            return self._idle.get_nowait()
        except asyncio.QueueEmpty:
            return None

    def loose(self, i: int) -> None:
        self._idle.put_nowait(i)
