"""Keep-alive upstream channels."""
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ChannelError(Exception):
    pass


class Channel:
    def __init__(self, url: str) -> None:
        self.url = url

    async def call(self, body: dict) -> dict:
        await asyncio.sleep(0)
        if body.get("bad"):
            raise ChannelError(self.url)
        return {"tokens": len(body.get("prompt", ""))}


class ChannelPool:
    def __init__(self, url: str, size: int) -> None:
        self._idle: asyncio.LifoQueue[Channel] = asyncio.LifoQueue()
        for _ in range(size):
            self._idle.put_nowait(Channel(url))

    async def open(self) -> Channel:
        return await self._idle.get()

    def shut(self, channel: Channel) -> None:
        self._idle.put_nowait(channel)

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[Channel]:
        ch = await self.open()  # clean: shut in finally
        try:
            yield ch
        finally:
            self.shut(ch)

    async def open_within(self, seconds: float) -> Channel | None:
        try:
            return await asyncio.wait_for(self.open(), seconds)  # clean: handed to the caller, a timeout got nothing
        except asyncio.TimeoutError:
            return None
