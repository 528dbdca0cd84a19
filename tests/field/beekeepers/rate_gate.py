"""Outbound proxy: per-host permits, retries and hedged requests."""
from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from dataclasses import dataclass
from typing import AsyncIterator, Optional

log = logging.getLogger("proxy.gate")


class Upstream5xx(Exception):
    pass


@dataclass(eq=False)
class Permit:
    host: str
    since: float


class HostGate:
    """Limits requests in flight to one host. enter() and leave() go in pairs."""

    def __init__(self, host: str, limit: int) -> None:
        self.host = host
        self.limit = limit
        self.inside: set[Permit] = set()
        self._cond = asyncio.Condition()

    async def enter(self) -> Permit:
        async with self._cond:
            await self._cond.wait_for(lambda: len(self.inside) < self.limit)
            permit = Permit(self.host, time.monotonic())
            self.inside.add(permit)
            return permit

    def enter_nowait(self) -> Optional[Permit]:
        if len(self.inside) >= self.limit:
            return None
        permit = Permit(self.host, time.monotonic())
        self.inside.add(permit)
        return permit

    async def leave(self, permit: Permit) -> None:
        async with self._cond:
            self.inside.discard(permit)
            self._cond.notify()

    @contextlib.asynccontextmanager
    async def passing(self) -> AsyncIterator[Permit]:
        permit = await self.enter()  # clean: left in the finally
        try:
            yield permit
        finally:
            await self.leave(permit)

    @contextlib.asynccontextmanager
    async def passing_or_skip(self) -> AsyncIterator[Optional[Permit]]:
        permit = self.enter_nowait()  # clean: near miss, left when not None
        try:
            yield permit
        finally:
            if permit is not None:
                await self.leave(permit)


class GateMap:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._gates: dict[str, HostGate] = {}

    def gate(self, host: str) -> HostGate:
        if host not in self._gates:
            self._gates[host] = HostGate(host, self.limit)
        return self._gates[host]

    async def enter(self, host: str) -> Permit:
        return await self.gate(host).enter()  # clean: wrapper, returned to the caller

    async def leave(self, permit: Permit) -> None:
        await self.gate(permit.host).leave(permit)


class Proxy:
    def __init__(self, gates: GateMap, client) -> None:
        self.gates = gates
        self.client = client
        self.streams: dict[int, Permit] = {}
        self.stats = {"ok": 0, "retry": 0, "cached": 0}

    async def get(self, host: str, path: str) -> bytes:
        async with self.gates.gate(host).passing():  # clean: context manager, return inside
            reply = await self.client.get(host, path)
            self.stats["ok"] += 1
            return reply.body

    async def get_retry(self, host: str, path: str, attempts: int = 4) -> Optional[bytes]:
        for attempt in range(attempts):
            permit = await self.gates.enter(host)  # leak: the retry after a 5xx enters again without leaving
            try:
                reply = await self.client.get(host, path)
            except Upstream5xx:
                self.stats["retry"] += 1
                await asyncio.sleep(2**attempt * 0.1 + random.random() * 0.05)
                continue
            await self.gates.leave(permit)
            return reply.body
        return None

    async def post_retry(self, host: str, path: str, body: bytes, attempts: int = 3) -> bool:
        for attempt in range(attempts):
            permit = await self.gates.enter(host)  # clean: near miss, the finally leaves before each continue
            try:
                await self.client.post(host, path, body)
                return True
            except Upstream5xx:
                self.stats["retry"] += 1
                continue
            finally:
                await self.gates.leave(permit)
        return False

    async def get_cached(self, cache: dict, host: str, path: str) -> bytes:
        permit = await self.gates.enter(host)  # leak: a hit in the cache returns without leaving
        if (host, path) in cache:
            self.stats["cached"] += 1
            return cache[host, path]
        reply = await self.client.get(host, path)
        cache[host, path] = reply.body
        await self.gates.leave(permit)
        return reply.body

    async def open_stream(self, host: str, path: str) -> int:
        permit = await self.gates.enter(host)  # clean: near miss, close_stream leaves by the stream number
        stream = await self.client.stream(host, path)
        self.streams[stream] = permit
        return stream

    async def close_stream(self, stream: int) -> None:
        permit = self.streams.pop(stream, None)
        await self.client.close(stream)
        if permit is not None:
            await self.gates.leave(permit)

    async def download(self, host: str, path: str, sink) -> int:
        stream = await self.open_stream(host, path)  # clean: closed in the finally
        total = 0
        try:
            async for chunk in self.client.chunks(stream):
                sink.write(chunk)
                total += len(chunk)
        finally:
            await self.close_stream(stream)
        return total

    async def peek(self, host: str, path: str, count: int) -> bytes:
        stream = await self.open_stream(host, path)  # leak: closed only when the body ended early
        head = b""
        async for chunk in self.client.chunks(stream):
            head += chunk
            if len(head) >= count:
                return head[:count]
        await self.close_stream(stream)
        return head

    async def hedged(self, first: str, second: str, path: str) -> bytes:
        left = await self.gates.enter(first)  # clean: left after the race
        right = self.gates.gate(second).enter_nowait()  # leak: left only when the second host won
        tasks = [asyncio.ensure_future(self.client.get(first, path))]
        if right is not None:
            tasks.append(asyncio.ensure_future(self.client.get(second, path)))
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await self.gates.leave(left)
        winner = done.pop()
        if right is not None and winner is tasks[1]:
            await self.gates.leave(right)
        return winner.result().body

    async def probe(self, host: str) -> str:
        async with self.gates.gate(host).passing_or_skip() as permit:  # clean: near miss, may be None
            if permit is None:
                return "busy"
            reply = await self.client.get(host, "/healthz")
            return "up" if reply.status == 200 else "down"

    async def fan_out(self, hosts: list[str], path: str) -> dict[str, bytes]:
        permits = [await self.gates.enter(h) for h in hosts]  # clean: all left by the gather below
        replies = await asyncio.gather(*(self.client.get(h, path) for h in hosts), return_exceptions=True)
        await asyncio.gather(*(self.gates.leave(p) for p in permits))
        return {h: r.body for h, r in zip(hosts, replies) if not isinstance(r, BaseException)}

    async def fire_and_forget(self, host: str, path: str, body: bytes) -> bool:
        permit = self.gates.gate(host).enter_nowait()  # clean: near miss, _post_then_leave leaves
        if permit is None:
            return False
        asyncio.ensure_future(self._post_then_leave(permit, path, body))
        return True

    async def _post_then_leave(self, permit: Permit, path: str, body: bytes) -> None:
        try:
            await self.client.post(permit.host, path, body)
        except Upstream5xx:
            log.warning("post to %s lost", permit.host)
        finally:
            await self.gates.leave(permit)


class Warmup:
    """Opens connections ahead of a traffic shift by holding permits for a while."""

    def __init__(self, gates: GateMap) -> None:
        self.gates = gates
        self.held: list[Permit] = []

    async def hold(self, host: str, count: int) -> None:
        self.held = [await self.gates.enter(host) for _ in range(count)]  # leak: a second hold() drops these

    async def let_go(self) -> None:
        while self.held:
            await self.gates.leave(self.held.pop())
