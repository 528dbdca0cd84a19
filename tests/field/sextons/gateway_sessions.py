from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, AsyncIterator

log = logging.getLogger("gateway")


class PermitGate:
    """Weighted concurrency limit per tenant."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.in_use = 0
        self._cond = asyncio.Condition()

    async def enter(self, weight: int = 1) -> int:
        async with self._cond:
            await self._cond.wait_for(lambda: self.in_use + weight <= self.total)
            self.in_use += weight
        return weight

    def try_enter(self, weight: int = 1) -> bool:
        if self.in_use + weight > self.total:
            return False
        self.in_use += weight
        return True

    async def leave(self, weight: int = 1) -> None:
        async with self._cond:
            self.in_use -= weight
            self._cond.notify_all()


@dataclass(eq=False)
class Upstream:
    url: str
    opened: float = field(default_factory=time.monotonic)
    broken: bool = False

    async def post(self, body: dict[str, Any]) -> dict[str, Any]:
        reader, writer = await asyncio.open_connection(self.url, 80)  # clean: near miss, closed in the finally also on cancellation
        try:
            writer.write(repr(body).encode())
            await writer.drain()
            return {"text": (await reader.read()).decode()}
        finally:
            writer.close()


class UpstreamPool:
    def __init__(self, urls: list[str], depth: int) -> None:
        self._q: asyncio.LifoQueue[Upstream] = asyncio.LifoQueue()
        for url in urls:
            for _ in range(depth):
                self._q.put_nowait(Upstream(url))

    async def borrow(self) -> Upstream:
        up = await self._q.get()  # clean: near miss, a broken one is replaced by a new one with the same place
        if up.broken:
            up = Upstream(up.url)
        return up

    def give_back(self, up: Upstream) -> None:
        self._q.put_nowait(up)

    @asynccontextmanager
    async def using(self) -> AsyncIterator[Upstream]:
        up = await self.borrow()  # clean: given back in the finally
        try:
            yield up
        except ConnectionError:
            up.broken = True
            raise
        finally:
            self.give_back(up)


@dataclass
class Session:
    sid: str
    tenant: str
    upstream: Upstream
    weight: int
    last_seen: float = field(default_factory=time.monotonic)


class Gateway:
    def __init__(self, pool: UpstreamPool, gates: dict[str, PermitGate]) -> None:
        self.pool = pool
        self.gates = gates
        self.sessions: dict[str, Session] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def open_session(self, sid: str, tenant: str, weight: int) -> bool:
        gate = self.gates[tenant]
        if not gate.try_enter(weight):  # leak: the timeout below returns without leaving the gate
            return False
        try:
            up = await asyncio.wait_for(self.pool.borrow(), 5.0)  # clean: near miss, kept in the session until it is closed
        except asyncio.TimeoutError:
            return False
        await self.close_session(sid)
        self.sessions[sid] = Session(sid, tenant, up, weight)
        return True

    async def close_session(self, sid: str) -> None:
        session = self.sessions.pop(sid, None)
        if session is None:
            return
        self.pool.give_back(session.upstream)
        await self.gates[session.tenant].leave(session.weight)

    async def expire(self, idle: float) -> int:
        now = time.monotonic()
        stale = [s for s in self.sessions.values() if now - s.last_seen > idle]
        for session in stale:
            await self.close_session(session.sid)
        return len(stale)

    async def generate(self, tenant: str, body: dict[str, Any]) -> dict[str, Any]:
        gate = self.gates[tenant]
        weight = await gate.enter(1 + len(body.get("prompt", "")) // 4096)  # clean: near miss, left in the finally whatever is returned
        try:
            async with self.pool.using() as up:  # clean: the context manager gives it back
                return await up.post(body)
        except ConnectionError:
            return {"error": "upstream"}
        finally:
            await gate.leave(weight)

    async def embed(self, tenant: str, body: dict[str, Any]) -> dict[str, Any] | None:
        gate = self.gates[tenant]
        await gate.enter(2)  # leak: two units are entered and one is left
        try:
            async with self.pool.using() as up:  # clean: the context manager gives it back
                return await up.post(body)
        finally:
            await gate.leave()

    async def retrying(self, body: dict[str, Any], attempts: int = 3) -> dict[str, Any] | None:
        for attempt in range(attempts):
            up = await self.pool.borrow()  # leak: a failed attempt goes round again without giving back
            try:
                result = await up.post(body)
            except ConnectionError:
                log.warning("attempt %d on %s failed", attempt, up.url)
                up.broken = True
                continue
            self.pool.give_back(up)
            return result
        return None

    async def hedge(self, body: dict[str, Any], delay: float) -> dict[str, Any]:
        first = await self.pool.borrow()  # clean: near miss, given back by the callback of its task
        primary = asyncio.create_task(first.post(body))
        primary.add_done_callback(lambda _t: self.pool.give_back(first))
        done, _ = await asyncio.wait({primary}, timeout=delay)
        if done:
            return primary.result()
        second = await self.pool.borrow()  # clean: near miss, given back by the callback of its task
        backup = asyncio.create_task(second.post(body))
        backup.add_done_callback(lambda _t: self.pool.give_back(second))
        done, pending = await asyncio.wait({primary, backup}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return done.pop().result()

    async def _warm(self, up: Upstream) -> None:
        try:
            await up.post({"prompt": "", "max_tokens": 1})
        except (ConnectionError, asyncio.CancelledError):
            up.broken = True
            return
        self.pool.give_back(up)

    async def warm(self, n: int) -> None:
        for _ in range(n):
            up = await self.pool.borrow()  # leak: the task that gets it returns on an error without giving it back
            task = asyncio.create_task(self._warm(up))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def shutdown(self) -> None:
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for sid in list(self.sessions):
            await self.close_session(sid)
