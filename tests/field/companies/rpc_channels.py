"""Async client of the decode workers: channels are pooled per worker."""
from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Awaitable, Callable, Mapping

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Channel:
    worker: str
    no: int
    closed: bool = False
    sent: int = 0

    async def call(self, method: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        self.sent += 1
        await asyncio.sleep(0)
        return {"ok": True, "method": method, **payload}


@dataclass
class ChannelPool:
    worker: str
    limit: int
    _idle: list[Channel] = field(default_factory=list)
    _made: int = 0
    _cond: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def connect(self) -> Channel:
        async with self._cond:  # clean: async with releases
            while not self._idle and self._made >= self.limit:
                await self._cond.wait()
            if self._idle:
                return self._idle.pop()  # clean: handed to the caller
            self._made += 1
            return Channel(self.worker, self._made)

    async def disconnect(self, ch: Channel) -> None:
        async with self._cond:  # clean: async with releases
            self._idle.append(ch)
            self._cond.notify()

    @contextlib.asynccontextmanager
    async def channel(self) -> AsyncIterator[Channel]:
        ch = await self.connect()  # clean: the finally disconnects
        try:
            yield ch
        finally:
            await self.disconnect(ch)


class WorkerClient:
    def __init__(self, pools: dict[str, ChannelPool]) -> None:
        self.pools = pools
        self._rr = itertools.cycle(sorted(pools))
        self.sticky: dict[str, tuple[str, Channel]] = {}

    async def call(self, method: str, **kw: Any) -> dict[str, Any]:
        async with self.pools[next(self._rr)].channel() as ch:  # clean: context manager
            return await ch.call(method, kw)

    async def call_all(self, method: str) -> list[dict[str, Any]]:
        outs = []
        for name, pool in self.pools.items():
            ch = await pool.connect()  # leak: a worker that does not answer ok is skipped with its channel
            r = await ch.call(method, {})
            if not r.get("ok"):
                logger.warning("%s failed on %s", method, name)
                continue
            outs.append(r)
            await pool.disconnect(ch)
        return outs

    async def broadcast(self, method: str) -> list[dict[str, Any]]:
        outs = []
        for pool in self.pools.values():
            ch = await pool.connect()  # clean: near miss, disconnected before the answer is looked at
            r = await ch.call(method, {})
            await pool.disconnect(ch)
            if not r.get("ok"):
                continue
            outs.append(r)
        return outs

    async def attach(self, rid: str) -> Channel:
        await self.detach(rid)
        name = next(self._rr)
        ch = await self.pools[name].connect()  # clean: in the sticky table, detach() disconnects
        self.sticky[rid] = (name, ch)
        return ch

    async def detach(self, rid: str) -> None:
        if rid in self.sticky:
            name, ch = self.sticky.pop(rid)
            await self.pools[name].disconnect(ch)

    async def migrate(self, rid: str, to: str) -> bool:
        new = await self.pools[to].connect()  # leak: a request that is not attached leaves the new channel behind
        old = self.sticky.get(rid)
        if old is None:
            return False
        r = await new.call("migrate", {"rid": rid})
        if not r["ok"]:
            await self.pools[to].disconnect(new)
            return False
        await self.pools[old[0]].disconnect(old[1])
        self.sticky[rid] = (to, new)
        return True

    async def hedge(self, method: str, a: str, b: str) -> dict[str, Any]:
        c1 = await self.pools[a].connect()  # clean: near miss, the loop disconnects both whoever wins
        c2 = await self.pools[b].connect()  # clean: near miss, the loop disconnects both whoever wins
        r = await c1.call(method, {})
        if not r["ok"]:
            r = await c2.call(method, {})
        for name, ch in ((a, c1), (b, c2)):
            await self.pools[name].disconnect(ch)
        return r

    async def hedge_winner(self, method: str, a: str, b: str) -> dict[str, Any]:
        c1 = await self.pools[a].connect()  # leak: the loser of the two is not disconnected
        c2 = await self.pools[b].connect()  # leak: the loser of the two is not disconnected
        r = await c1.call(method, {})
        if r["ok"]:
            await self.pools[a].disconnect(c1)
            return r
        r = await c2.call(method, {})
        await self.pools[b].disconnect(c2)
        return r

    async def retry(self, method: str, pool: ChannelPool, n: int) -> dict[str, Any] | None:
        for i in range(n):
            ch = await pool.connect()  # leak: the handler only logs and goes on with another channel
            try:
                r = await ch.call(method, {"try": i})
            except ConnectionError:
                logger.info("attempt %d failed", i)
                continue
            await pool.disconnect(ch)
            return r
        return None

    async def retry_same(self, method: str, pool: ChannelPool, n: int) -> dict[str, Any] | None:
        ch = await pool.connect()  # clean: near miss, one channel for all attempts
        r = None
        for i in range(n):
            try:
                r = await ch.call(method, {"try": i})
            except ConnectionError:
                continue
            break
        await pool.disconnect(ch)
        return r

    async def spawn(self, pool: ChannelPool, fn: Callable[[Channel], Awaitable[None]]) -> asyncio.Task:
        ch = await pool.connect()  # clean: near miss, the task disconnects

        async def body() -> None:
            try:
                await fn(ch)
            finally:
                await pool.disconnect(ch)

        return asyncio.create_task(body())

    async def spawn_bare(self, pool: ChannelPool, fn: Callable[[Channel], Awaitable[None]]) -> asyncio.Task:
        ch = await pool.connect()  # leak: the task uses the channel and nobody disconnects it
        return asyncio.create_task(fn(ch))
