"""Async gateway: pooled upstream connections to inference replicas, retries, hedging, streaming."""
from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import AsyncIterator, Optional


@dataclass
class Upstream:
    replica: str
    serial: int
    opened_at: float
    broken: bool = False
    served: int = 0

    async def send(self, body: dict) -> dict:
        await asyncio.sleep(0)
        self.served += 1
        return {"status": 200, "replica": self.replica, "body": body}

    async def chunks(self, body: dict) -> AsyncIterator[dict]:
        for i in range(body.get("max_tokens", 1)):
            await asyncio.sleep(0)
            yield {"index": i, "text": "", "error": None}


class UpstreamPool:
    def __init__(self, per_replica: int) -> None:
        self.per_replica = per_replica
        self._idle: dict[str, list[Upstream]] = defaultdict(list)
        self._open: dict[str, int] = defaultdict(int)
        self._cond = asyncio.Condition()
        self._serial = 0

    async def checkout(self, replica: str) -> Upstream:
        async with self._cond:
            while True:
                if self._idle[replica]:
                    return self._idle[replica].pop()
                if self._open[replica] < self.per_replica:
                    self._open[replica] += 1
                    self._serial += 1
                    return Upstream(replica, self._serial, time.monotonic())
                await self._cond.wait()

    def try_checkout(self, replica: str) -> Optional[Upstream]:
        if self._idle[replica]:
            return self._idle[replica].pop()
        return None

    async def checkin(self, conn: Upstream) -> None:
        async with self._cond:
            if conn.broken:
                self._open[conn.replica] -= 1
            else:
                self._idle[conn.replica].append(conn)
            self._cond.notify()


class Session:
    """`async with Session(pool, replica) as conn`."""

    def __init__(self, pool: UpstreamPool, replica: str) -> None:
        self.pool = pool
        self.replica = replica
        self.conn: Optional[Upstream] = None

    async def __aenter__(self) -> Upstream:
        self.conn = await self.pool.checkout(self.replica)  # clean: __aexit__ checks it in
        return self.conn

    async def __aexit__(self, kind, exc, tb) -> None:
        if kind is not None:
            self.conn.broken = True
        await self.pool.checkin(self.conn)


class QuietSession(Session):
    """Swallows timeouts so that health checks do not pollute the log."""

    async def __aenter__(self) -> Upstream:
        self.conn = await self.pool.checkout(self.replica)  # leak: an idle __aexit__ returns before checkin
        return self.conn

    async def __aexit__(self, kind, exc, tb) -> bool:
        if self.conn.served == 0:
            return False
        if kind is asyncio.TimeoutError:
            self.conn.broken = True
        await self.pool.checkin(self.conn)
        return kind is asyncio.TimeoutError


class Gateway:
    def __init__(self, pool: UpstreamPool, replicas: list[str]) -> None:
        self.pool = pool
        self.replicas = replicas
        self.latency: dict[str, float] = {}
        self.sticky: dict[str, Upstream] = {}

    def _rank(self) -> list[str]:
        return sorted(self.replicas, key=lambda r: self.latency.get(r, 0.0))

    async def complete_with_retry(self, body: dict, attempts: int) -> dict:
        reply: dict = {"status": 503}
        for i in range(attempts):
            conn = await self.pool.checkout(self._rank()[i % len(self.replicas)])  # leak: retries lose it
            reply = await conn.send(body)
            if reply["status"] in (429, 503):
                await asyncio.sleep(0.05 * 2 ** i)
                continue
            await self.pool.checkin(conn)
            break
        return reply

    async def complete_fallback(self, body: dict) -> dict:
        reply: dict = {"status": 503}
        for replica in self._rank():
            conn = await self.pool.checkout(replica)  # clean: the finally also covers continue
            try:
                reply = await conn.send(body)
                if reply["status"] != 200:
                    conn.broken = True
                    continue
                return reply
            finally:
                await self.pool.checkin(conn)
        return reply

    async def idle_ages(self) -> list[float]:
        ages = []
        now = time.monotonic()
        for replica in self.replicas:
            conn = self.pool.try_checkout(replica)  # leak: old ones are measured and dropped
            if conn is None:
                continue
            ages.append(now - conn.opened_at)
            if ages[-1] < 60.0:
                await self.pool.checkin(conn)
        return ages

    async def stream(self, body: dict) -> AsyncIterator[str]:
        conn = await self.pool.checkout(self._rank()[0])  # leak: an error chunk returns without checkin
        async for chunk in conn.chunks(body):
            if chunk["error"]:
                yield "event: error\n\n"
                return
            yield f"data: {chunk['text']}\n\n"
        await self.pool.checkin(conn)
        yield "data: [DONE]\n\n"

    async def stream_guarded(self, body: dict) -> AsyncIterator[str]:
        conn = await self.pool.checkout(self._rank()[0])  # clean: near miss, finally also covers the return
        try:
            async for chunk in conn.chunks(body):
                if chunk["error"]:
                    return
                yield f"data: {chunk['text']}\n\n"
        finally:
            await self.pool.checkin(conn)

    async def hedge(self, body: dict) -> dict:
        """Send to the two best replicas, take the first answer."""
        first, second = self._rank()[:2]
        a = await self.pool.checkout(first)  # clean: checked in by its task's wrapper
        b = await self.pool.checkout(second)  # clean: checked in by its task's wrapper

        async def run(conn: Upstream) -> dict:
            try:
                return await conn.send(body)
            finally:
                await self.pool.checkin(conn)

        tasks = [asyncio.ensure_future(run(a)), asyncio.ensure_future(run(b))]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    async def open_sticky(self, user: str) -> None:
        if user in self.sticky:
            return
        conn = self.pool.try_checkout(self._rank()[0])  # clean: near miss, close_sticky checks it in
        if conn is not None:
            self.sticky[user] = conn

    async def reroute_sticky(self, user: str, replica: str) -> None:
        fresh = await self.pool.checkout(replica)  # clean: near miss, replaces the one that is checked in
        held = self.sticky.get(user)
        self.sticky[user] = fresh
        if held is not None:
            await self.pool.checkin(held)

    async def close_sticky(self, user: str) -> None:
        conn = self.sticky.pop(user, None)
        if conn is not None:
            await self.pool.checkin(conn)


async def warm(pool: UpstreamPool, replicas: list[str], n: int) -> int:
    """Open n connections to each replica ahead of traffic."""
    opened: list[Upstream] = []
    for replica in replicas:
        for _ in range(min(n, pool.per_replica)):
            opened.append(await pool.checkout(replica))  # clean: near miss, all are checked in below
    for conn in opened:
        await pool.checkin(conn)
    return len(opened)
