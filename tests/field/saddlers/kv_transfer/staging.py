"""Pinned staging buffers."""
from __future__ import annotations

import asyncio
from typing import List

try:
    import torch
except ImportError:
    torch = None


class StagingBuffer:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        if torch is not None and torch.cuda.is_available():
            self.view = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        else:
            self.view = bytearray(nbytes)
        self.filled = 0

    def load(self, payload: bytes) -> int:
        n = min(len(payload), self.nbytes)
        self.view[:n] = bytearray(payload[:n])
        self.filled = n
        return n

    def bytes(self) -> bytes:
        return bytes(self.view[:self.filled])


class StagingPool:
    """A bounded set of pinned buffers; ``get`` waits for one."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._idle: "asyncio.Queue[StagingBuffer]" = asyncio.Queue()
        self.count = count
        for _ in range(count):
            self._idle.put_nowait(StagingBuffer(nbytes))

    async def checkout_buffer(self) -> StagingBuffer:
        return await self._idle.get()

    def checkin_buffer(self, buf: StagingBuffer) -> None:
        buf.filled = 0
        self._idle.put_nowait(buf)

    @property
    def idle(self) -> int:
        return self._idle.qsize()


async def staged(pool: StagingPool, payload: bytes) -> StagingBuffer:
    """A buffer from the pool that holds ``payload``."""
    buf = await pool.checkout_buffer()  # clean: handed to the caller
    buf.load(payload)
    return buf


async def drain_all(pool: StagingPool) -> List[StagingBuffer]:
    return [await pool.checkout_buffer() for _ in range(pool.count)]  # clean: the list is handed to the caller
