# -*- coding: utf-8 -*-
"""Channels to remote workers: opened lazily, shared, closed by the registry."""
import asyncio
import contextlib
import itertools
import logging
from typing import AsyncIterator, Dict, List, Optional

logger = logging.getLogger("rpc")


class Channel:
    ids = itertools.count()

    def __init__(self, target: str) -> None:
        self.target = target
        self.id = next(self.ids)
        self.is_open = True

    async def invoke(self, method: str, *args: object) -> object:
        if not self.is_open:
            raise ConnectionResetError(self.target)
        await asyncio.sleep(0)
        return (method, args)


class ChannelRegistry:
    def __init__(self, per_target: int = 2) -> None:
        self.per_target = per_target
        self.live: Dict[str, List[Channel]] = {}

    async def open_channel(self, target: str) -> Optional[Channel]:
        chans = self.live.setdefault(target, [])
        if len(chans) >= self.per_target:
            return None
        await asyncio.sleep(0)
        ch = Channel(target)
        chans.append(ch)
        return ch

    async def close_channel(self, ch: Channel) -> None:
        ch.is_open = False
        self.live[ch.target].remove(ch)

    @contextlib.asynccontextmanager
    async def channel(self, target: str) -> AsyncIterator[Channel]:
        ch = await self.open_channel(target)  # clean: None raises, else finally closes
        if ch is None:
            raise ConnectionRefusedError(target)
        try:
            yield ch
        finally:
            await self.close_channel(ch)


class WorkerGroup:
    def __init__(self, registry: ChannelRegistry, targets: List[str]) -> None:
        self.registry = registry
        self.targets = targets
        self.channels: Dict[str, Channel] = {}
        self.control: Optional[Channel] = None
        self.lock = asyncio.Lock()

    async def connect(self) -> bool:
        for t in self.targets:
            if t in self.channels:
                continue
            ch = await self.registry.open_channel(t)  # clean: kept in channels, disconnect closes all
            if ch is None:
                await self.disconnect()
                return False
            self.channels[t] = ch
        return True

    async def disconnect(self) -> None:
        while self.channels:
            _, ch = self.channels.popitem()
            await self.registry.close_channel(ch)

    async def connect_control(self) -> None:
        if self.control is None:
            self.control = await self.registry.open_channel(self.targets[0])  # leak: shutdown returns early without workers and leaves it open

    async def shutdown(self) -> None:
        if not self.channels:
            return
        await self.disconnect()
        if self.control is not None:
            await self.registry.close_channel(self.control)
            self.control = None

    async def ask(self, target: str, method: str) -> object:
        async with self.registry.channel(target) as ch:  # clean: own async context manager
            return await ch.invoke(method)

    async def ask_once(self, target: str, method: str) -> Optional[object]:
        ch = await self.registry.open_channel(target)  # leak: the reset handler returns None without close
        if ch is None:
            return None
        try:
            res = await ch.invoke(method)
        except ConnectionResetError:
            return None
        await self.registry.close_channel(ch)
        return res

    async def ask_twice(self, target: str, method: str) -> Optional[object]:
        ch = await self.registry.open_channel(target)  # clean: near miss, the handler passes on to close
        if ch is None:
            return None
        res = None
        for _ in range(2):
            try:
                res = await ch.invoke(method)
                break
            except ConnectionResetError:
                continue
        await self.registry.close_channel(ch)
        return res

    async def first_up(self, method: str) -> Optional[object]:
        for t in self.targets:
            ch = await self.registry.open_channel(t)  # leak: the loop goes on after a falsy answer without close
            if ch is None:
                continue
            res = await ch.invoke(method)
            if not res:
                continue
            await self.registry.close_channel(ch)
            return res
        return None

    async def gather_all(self, method: str) -> List[object]:
        chans = [await self.registry.open_channel(t) for t in self.targets]  # leak: one missing channel returns [] with the others open
        if any(c is None for c in chans):
            return []
        res = [await c.invoke(method) for c in chans]
        for c in chans:
            await self.registry.close_channel(c)
        return res

    async def gather_some(self, method: str) -> List[object]:
        chans = [await self.registry.open_channel(t) for t in self.targets]  # clean: near miss, only the None entries are filtered out
        good = [c for c in chans if c is not None]
        res = [await c.invoke(method) for c in good]
        for c in good:
            await self.registry.close_channel(c)
        return res

    async def exclusive(self, target: str, method: str) -> Optional[object]:
        await self.lock.acquire()  # clean: released in finally
        try:
            ch = self.channels.get(target)
            return await ch.invoke(method) if ch else None
        finally:
            self.lock.release()

    async def exclusive_ask(self, target: str, method: str) -> Optional[object]:
        await self.lock.acquire()  # leak: an unconnected target returns with the lock
        ch = self.channels.get(target)
        if ch is None:
            logger.warning("%s is not connected", target)
            return None
        res = await ch.invoke(method)
        self.lock.release()
        return res

    async def stack_all(self, method: str) -> List[object]:
        out: List[object] = []
        async with contextlib.AsyncExitStack() as stack:
            for t in self.targets:
                ch = await stack.enter_async_context(self.registry.channel(t))  # clean: the stack closes it
                out.append(await ch.invoke(method))
                if len(out) > 8:
                    break
        return out

    async def ping(self, target: str) -> bool:
        return (await self.registry.open_channel(target)) is not None  # leak: the channel is only tested
