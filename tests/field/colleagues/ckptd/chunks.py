"""Chunk buffers of the checkpoint daemon and a metered wrapper of them."""
from __future__ import annotations

import asyncio
from typing import Optional, Protocol

class Chunks(Protocol):
    async def rent(self) -> bytearray: ...
    def repay(self, buf: bytearray) -> None: ...

class HostChunks:
    def __init__(self, n: int, size: int) -> None:
        self.q: asyncio.LifoQueue[bytearray] = asyncio.LifoQueue()
        for _ in range(n):
            self.q.put_nowait(bytearray(size))
    async def rent(self) -> bytearray:
        return await self.q.get()
    def rent_nowait(self) -> Optional[bytearray]:
        try:
            return self.q.get_nowait()
        except asyncio.QueueEmpty:
            return None
    def repay(self, buf: bytearray) -> None:
        self.q.put_nowait(buf)

class MeteredChunks:
    """A tenant's share of another pool."""
    def __init__(self, base: HostChunks, share: int) -> None:
        self.base = base
        self.share = asyncio.Semaphore(share)
    async def rent(self) -> bytearray:
        await self.share.acquire()  # clean: near miss, repay() releases the share
        return await self.base.rent()  # clean: handed to the caller
    async def rent_within(self, seconds: float) -> Optional[bytearray]:
        await self.share.acquire()  # leak: the timeout returns None and keeps the share
        try:
            return await asyncio.wait_for(self.base.rent(), seconds)  # clean: handed to the caller
        except asyncio.TimeoutError:
            return None
    async def rent_idle(self) -> Optional[bytearray]:
        await self.share.acquire()  # clean: near miss, released when no chunk is idle
        buf = self.base.rent_nowait()  # clean: handed to the caller
        if buf is None:
            self.share.release()
        return buf
    def repay(self, buf: bytearray) -> None:
        self.base.repay(buf)
        self.share.release()
