from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Optional


class RemoteMiss(KeyError):
    pass


@dataclass
class Channel:
    cid: int
    broken: bool = False


class RemoteStore:
    """Keeps a fixed set of channels to a remote KV store."""

    def __init__(self, transport, channels: int) -> None:
        self.transport = transport
        self._idle: asyncio.LifoQueue[Channel] = asyncio.LifoQueue()
        for cid in range(channels):
            self._idle.put_nowait(Channel(cid))

    async def get_channel(self) -> Channel:
        return await self._idle.get()

    def put_channel(self, ch: Channel) -> None:
        if ch.broken:
            ch = Channel(ch.cid)
        self._idle.put_nowait(ch)

    async def exists(self, key: str) -> bool:
        ch = await self.get_channel()  # clean: put in finally
        try:
            return await self.transport.head(ch.cid, key)
        finally:
            self.put_channel(ch)

    async def fetch(self, key: str, dest: memoryview) -> int:
        ch = await self.get_channel()  # clean: near miss, put before RemoteMiss is raised
        n = await self.transport.get(ch.cid, key, dest)
        self.put_channel(ch)
        if n < 0:
            raise RemoteMiss(key)
        return n

    async def store(self, key: str, src: memoryview, retries: int = 2) -> bool:
        for _ in range(retries + 1):
            ch = await self.get_channel()  # leak: a reset marks the channel broken and goes round without put
            try:
                await self.transport.put(ch.cid, key, src)
            except ConnectionResetError:
                ch.broken = True
                continue
            self.put_channel(ch)
            return True
        return False

    async def ping_all(self, n: int) -> int:
        alive = 0
        for _ in range(n):
            ch = await self.get_channel()  # clean: near miss, put before the loop goes round in both cases
            try:
                await self.transport.head(ch.cid, "")
            except ConnectionResetError:
                ch.broken = True
                self.put_channel(ch)
                continue
            alive += 1
            self.put_channel(ch)
        return alive

    async def stat(self, key: str) -> Optional[dict]:
        ch = await self.get_channel()  # leak: an unknown key returns without put
        info = await self.transport.stat(ch.cid, key)
        if info is None:
            return None
        self.put_channel(ch)
        return info
