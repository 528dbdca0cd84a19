"""Async front door: per-tenant token budgets, connection slots to replicas, and stream registrations."""
from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import AsyncIterator, Awaitable, Callable, Optional

log = logging.getLogger("gateway")

Call = Callable[["Conn", dict], Awaitable[dict]]


class TokenBudget:
    """Tokens in flight for a tenant. reserve answers whether they were taken."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._changed = asyncio.Event()

    def reserve(self, n: int) -> bool:
        if self.used + n > self.limit:
            return False
        self.used += n
        return True

    async def reserve_wait(self, n: int) -> None:
        while not self.reserve(n):  # clean: a granted reservation is handed to the caller
            self._changed.clear()
            await self._changed.wait()

    def refund(self, n: int) -> None:
        self.used -= n
        self._changed.set()


@dataclass(eq=False)
class Conn:
    replica: str
    opened: float = field(default_factory=time.monotonic)
    broken: bool = False


class ConnPool:
    def __init__(self, replica: str, size: int) -> None:
        self.replica = replica
        self._slots = asyncio.Semaphore(size)
        self._idle: list[Conn] = []

    async def get(self) -> Conn:
        await self._slots.acquire()  # clean: near miss, put releases the slot of the connection that is returned
        return self._idle.pop() if self._idle else Conn(self.replica)

    def put(self, conn: Conn) -> None:
        if not conn.broken:
            self._idle.append(conn)
        self._slots.release()

    async def get_within(self, seconds: float) -> Optional[Conn]:
        try:
            return await asyncio.wait_for(self.get(), seconds)  # clean: handed on
        except asyncio.TimeoutError:
            return None

    @asynccontextmanager
    async def conn(self) -> AsyncIterator[Conn]:
        c = await self.get()  # clean: put in finally
        try:
            yield c
        finally:
            self.put(c)


class PooledCall:
    """async with PooledCall(pool) as conn"""

    def __init__(self, pool: ConnPool) -> None:
        self.pool = pool
        self.conn: Optional[Conn] = None

    async def __aenter__(self) -> Conn:
        self.conn = await self.pool.get()  # leak: __aexit__ returns early after an error and keeps the connection
        return self.conn

    async def __aexit__(self, kind, exc, tb) -> bool:
        if kind is not None and issubclass(kind, ConnectionError):
            log.warning("replica %s: %s", self.pool.replica, exc)
            return True
        self.pool.put(self.conn)
        return False


class Gateway:
    def __init__(self, replicas: list[str], per_replica: int, budget: int) -> None:
        self.pools = {r: ConnPool(r, per_replica) for r in replicas}
        self.budgets: dict[str, TokenBudget] = {}
        self.default_budget = budget
        self.streams: dict[str, tuple[ConnPool, Conn]] = {}
        self.gate = asyncio.Semaphore(256)

    def budget(self, tenant: str) -> TokenBudget:
        return self.budgets.setdefault(tenant, TokenBudget(self.default_budget))

    def pick(self, body: dict) -> ConnPool:
        names = sorted(self.pools)
        return self.pools[names[hash(body.get("session", "")) % len(names)]]

    async def complete(self, tenant: str, body: dict, call: Call) -> dict:
        budget = self.budget(tenant)
        want = body.get("max_tokens", 256)
        if not budget.reserve(want):  # clean: refunded in finally
            return {"error": "rate_limited"}
        try:
            async with self.pick(body).conn() as conn:  # clean: async context manager
                return await call(conn, body)
        finally:
            budget.refund(want)

    async def complete_cached(self, tenant: str, body: dict, call: Call, cache: dict[str, dict]) -> dict:
        budget = self.budget(tenant)
        want = body.get("max_tokens", 256)
        await budget.reserve_wait(want)  # leak: a cached answer is returned without the refund
        hit = cache.get(body["prompt"])
        if hit is not None:
            return hit
        async with self.pick(body).conn() as conn:  # clean: async context manager
            reply = await call(conn, body)
        cache[body["prompt"]] = reply
        budget.refund(want)
        return reply

    async def complete_quick(self, body: dict, call: Call) -> dict:
        pool = self.pick(body)
        conn = await pool.get_within(0.25)  # leak: not put after a reply that says overloaded
        if conn is None:
            return {"error": "busy"}
        reply = await call(conn, body)
        if reply.get("status") == 503:
            return {"error": "overloaded"}
        pool.put(conn)
        return reply

    async def with_failover(self, body: dict, call: Call) -> dict:
        last: dict = {"error": "no replica"}
        for name, pool in self.pools.items():
            conn = await pool.get_within(0.5)  # clean: near miss, put before either way on
            if conn is None:
                continue
            last = await call(conn, body)
            conn.broken = "error" in last
            pool.put(conn)
            if not conn.broken:
                return last
            log.info("failing over from %s", name)
        return last

    async def with_retry(self, body: dict, call: Call, tries: int) -> dict:
        pool = self.pick(body)
        conn = await pool.get()  # clean: either put for a fresh one in the loop, or at the end
        reply = await call(conn, body)
        while "error" in reply and tries > 0:
            tries -= 1
            conn.broken = True
            pool.put(conn)
            conn = await pool.get()  # clean: near miss, the former one has just been put
            reply = await call(conn, body)
        pool.put(conn)
        return reply

    async def hedged(self, body: dict, call: Call) -> dict:
        first, second = list(self.pools.values())[:2]
        a = await first.get()  # clean: put by the done callback of its task
        b = await second.get()  # leak: no callback puts the connection of the second task
        ta = asyncio.create_task(call(a, body))
        tb = asyncio.create_task(call(b, body))
        ta.add_done_callback(lambda _t: first.put(a))
        done, pending = await asyncio.wait({ta, tb}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return next(iter(done)).result()

    async def open_stream(self, stream_id: str, body: dict) -> Conn:
        pool = self.pick(body)
        conn = await pool.get()  # clean: near miss, kept in streams, close_stream or shutdown puts it
        self.close_stream(stream_id)
        self.streams[stream_id] = (pool, conn)
        return conn

    def close_stream(self, stream_id: str) -> None:
        entry = self.streams.pop(stream_id, None)
        if entry is not None:
            pool, conn = entry
            pool.put(conn)

    async def shutdown(self) -> None:
        for stream_id in list(self.streams):
            self.close_stream(stream_id)

    async def batch(self, bodies: list[dict], call: Call) -> list[dict]:
        async def one(body: dict) -> dict:
            await self.gate.acquire()  # clean: released in finally
            try:
                async with self.pick(body).conn() as conn:  # clean: async context manager
                    return await call(conn, body)
            finally:
                self.gate.release()

        return list(await asyncio.gather(*(one(b) for b in bodies)))

    async def batch_ordered(self, bodies: list[dict], call: Call) -> list[dict]:
        out = []
        for body in bodies:
            await self.gate.acquire()  # leak: an empty prompt goes on to the next body inside the gate
            if not body.get("prompt"):
                out.append({"error": "empty"})
                continue
            async with PooledCall(self.pick(body)) as conn:  # clean: the way in and out is the manager's own matter
                out.append(await call(conn, body))
            self.gate.release()
        return out

    async def health(self, call: Call) -> dict[str, bool]:
        alive = {}
        for name, pool in self.pools.items():
            conn = await pool.get_within(1.0)  # leak: put only for a replica that answers
            if conn is None:
                alive[name] = False
                continue
            reply = await call(conn, {"ping": True})
            alive[name] = reply.get("pong", False)
            if alive[name]:
                pool.put(conn)
        return alive
