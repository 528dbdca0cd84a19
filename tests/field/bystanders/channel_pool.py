"""Connections from the router to the engine replicas."""
from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, AsyncIterator, DefaultDict, Dict, List, Optional

logger = logging.getLogger(__name__)


@dataclass
class Channel:
    target: str
    index: int
    broken: bool = False

    async def call(self, method: str, payload: Any) -> Any:
        await asyncio.sleep(0)
        return {"method": method, "payload": payload}


class ChannelPool:
    def __init__(self, per_target: int = 8) -> None:
        self.per_target = per_target
        self._idle: DefaultDict[str, List[Channel]] = defaultdict(list)
        self._made: DefaultDict[str, int] = defaultdict(int)

    async def checkout(self, target: str) -> Channel:
        while True:
            while self._idle[target]:
                ch = self._idle[target].pop()  # clean: near miss, a broken one is uncounted before the next, others are returned
                if not ch.broken:
                    return ch
                self._made[target] -= 1
            if self._made[target] < self.per_target:
                self._made[target] += 1
                return Channel(target, self._made[target])
            await asyncio.sleep(0.005)

    async def checkin(self, ch: Channel) -> None:
        self._idle[ch.target].append(ch)

    @asynccontextmanager
    async def channel(self, target: str) -> AsyncIterator[Channel]:
        ch = await self.checkout(target)  # clean: finally
        try:
            yield ch
        finally:
            await self.checkin(ch)


class Router:
    def __init__(self, pool: ChannelPool, replicas: List[str]) -> None:
        self.pool = pool
        self.replicas = replicas
        self.sticky: Dict[str, Channel] = {}
        self._next = 0

    def _pick(self) -> str:
        self._next = (self._next + 1) % len(self.replicas)
        return self.replicas[self._next]

    async def generate(self, payload: Dict[str, Any]) -> Any:
        async with self.pool.channel(self._pick()) as ch:  # clean: async with
            reply = await ch.call("generate", payload)
            if "error" in reply:
                raise RuntimeError(reply["error"])
            return reply

    async def health(self) -> Dict[str, bool]:
        status = {}
        for r in self.replicas:
            ch = await self.pool.checkout(r)  # leak: a broken channel is noted and the loop goes on without checkin
            if ch.broken:
                status[r] = False
                continue
            status[r] = bool(await ch.call("health", None))
            await self.pool.checkin(ch)
        return status

    async def models(self) -> List[str]:
        found: List[str] = []
        for r in self.replicas:
            ch = await self.pool.checkout(r)  # clean: near miss, checkin happens before the continue
            reply = await ch.call("models", None)
            await self.pool.checkin(ch)
            if not reply:
                continue
            found.extend(reply)
        return found

    async def retry(self, payload: Any, attempts: int = 3) -> Optional[Any]:
        for i in range(attempts):
            ch = await self.pool.checkout(self._pick())  # leak: after a timeout the next attempt checks out another and forgets this one
            try:
                reply = await asyncio.wait_for(ch.call("generate", payload), 10)
            except asyncio.TimeoutError:
                logger.warning("attempt %d timed out", i)
                continue
            await self.pool.checkin(ch)
            return reply
        return None

    async def retry_timed(self, payload: Any, attempts: int = 3) -> Optional[Any]:
        for i in range(attempts):
            ch = await self.pool.checkout(self._pick())  # clean: near miss, the finally also serves continue and return
            try:
                return await asyncio.wait_for(ch.call("generate", payload), 10)
            except asyncio.TimeoutError:
                logger.warning("attempt %d timed out", i)
                continue
            finally:
                await self.pool.checkin(ch)
        return None

    async def attach(self, session: str) -> None:
        if session in self.sticky:
            return
        self.sticky[session] = await self.pool.checkout(self._pick())  # clean: detach checks it in

    async def detach(self, session: str) -> None:
        ch = self.sticky.pop(session, None)
        if ch is not None:
            await self.pool.checkin(ch)

    async def broadcast(self, method: str, payload: Any) -> List[Any]:
        async with AsyncExitStack() as stack:
            chans = [await stack.enter_async_context(self.pool.channel(r)) for r in self.replicas]  # clean: the stack exits all
            return list(await asyncio.gather(*(c.call(method, payload) for c in chans)))

    async def fastest(self, payload: Any) -> Any:
        chans = [await self.pool.checkout(r) for r in self.replicas]  # leak: only the first channel is checked in
        replies = await asyncio.gather(*(c.call("generate", payload) for c in chans))
        await self.pool.checkin(chans[0])
        return replies[0]
