"""Flat buffers that carry weight shards from the trainer to the rollout workers."""
from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import AsyncIterator, Optional


class SyncBuffer:
    def __init__(self, ident: int, size: int) -> None:
        self.ident = ident
        self.data = bytearray(size)
        self.used = 0
        self.version = -1


class SyncBufferPool:
    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._idle: asyncio.Queue[SyncBuffer] = asyncio.Queue()
        for i in range(count):
            self._idle.put_nowait(SyncBuffer(i, size))

    async def rent(self) -> SyncBuffer:
        return await self._idle.get()

    def rent_nowait(self) -> Optional[SyncBuffer]:
        try:
            return self._idle.get_nowait()
        except asyncio.QueueEmpty:
            return None

    def unrent(self, buf: SyncBuffer) -> None:
        buf.used = 0
        self._idle.put_nowait(buf)

    @property
    def idle(self) -> int:
        return self._idle.qsize()

    @asynccontextmanager
    async def rented(self) -> AsyncIterator[SyncBuffer]:
        buf = await self.rent()  # clean: finally
        try:
            yield buf
        finally:
            self.unrent(buf)
