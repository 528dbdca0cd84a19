"""Channels to model workers, leased per call."""
from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import AsyncIterator, Optional


class WorkerBusy(Exception):
    pass


@dataclass(eq=False)
class Channel:
    worker: str
    healthy: bool = True
    calls: int = 0
    busy: bool = False

    async def call(self, payload: bytes) -> bytes:
        self.calls += 1
        await asyncio.sleep(0)
        if self.busy:
            raise WorkerBusy(self.worker)
        return payload[::-1]

    async def chunks(self, payload: bytes) -> AsyncIterator[bytes]:
        for i in range(0, len(payload), 4):
            await asyncio.sleep(0)
            yield payload[i:i + 4]


class ChannelPool:
    def __init__(self, workers: list[str]) -> None:
        self._idle: list[Channel] = [Channel(w) for w in workers]
        self._cond = asyncio.Condition()

    async def lease(self) -> Channel:
        async with self._cond:
            await self._cond.wait_for(lambda: bool(self._idle))
            return self._idle.pop()

    async def hand_back(self, ch: Channel) -> None:
        async with self._cond:
            self._idle.append(ch)
            self._cond.notify()

    async def lease_healthy(self) -> Optional[Channel]:
        ch = await self.lease()  # leak: an unhealthy channel is neither returned to the caller nor handed back
        if not ch.healthy:
            return None
        return ch

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[Channel]:
        ch = await self.lease()  # clean: finally hands it back
        try:
            yield ch
        finally:
            await self.hand_back(ch)
