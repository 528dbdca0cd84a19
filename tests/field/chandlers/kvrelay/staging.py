from __future__ import annotations

import asyncio


class BounceBuffer:
    __slots__ = ("mem", "filled")

    def __init__(self, size: int) -> None:
        self.mem = bytearray(size)
        self.filled = 0

    def load(self, data: bytes) -> bool:
        if len(data) > len(self.mem):
            return False
        self.mem[:len(data)] = data
        self.filled = len(data)
        return True


class BouncePool:
    def __init__(self, count: int, size: int) -> None:
        self._q: asyncio.Queue[BounceBuffer] = asyncio.Queue()
        for _ in range(count):
            self._q.put_nowait(BounceBuffer(size))

    async def claim(self) -> BounceBuffer:
        return await self._q.get()

    def unclaim(self, buf: BounceBuffer) -> None:
        buf.filled = 0
        self._q.put_nowait(buf)

    async def claim_within(self, seconds: float) -> BounceBuffer | None:
        try:
            return await asyncio.wait_for(self.claim(), seconds)  # clean: near miss, upon timeout nothing was taken, else handed on
        except asyncio.TimeoutError:
            return None
