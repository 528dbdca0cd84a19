from __future__ import annotations

import asyncio
from typing import Protocol


class LaneProvider(Protocol):
    async def open_lane(self) -> Lane: ...

    async def close_lane(self, lane: Lane) -> None: ...


class Lane:
    def __init__(self, number: int) -> None:
        self.number = number
        self.sent = 0

    async def send(self, data: bytes) -> None:
        await asyncio.sleep(0)
        self.sent += len(data)


class LaneRegistry:
    def __init__(self, n: int) -> None:
        self._spare = [Lane(i) for i in range(n)]
        self._cond = asyncio.Condition()

    async def open_lane(self) -> Lane:
        async with self._cond:
            await self._cond.wait_for(lambda: bool(self._spare))
            return self._spare.pop()

    async def close_lane(self, lane: Lane) -> None:
        async with self._cond:
            self._spare.append(lane)
            self._cond.notify()
