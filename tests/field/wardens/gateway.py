from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Optional

logger = logging.getLogger(__name__)


class PermitGate:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.active = 0
        self._cond = asyncio.Condition()

    def try_enter(self) -> bool:
        if self.active >= self.limit:
            return False
        self.active += 1
        return True

    async def enter(self) -> None:
        async with self._cond:
            await self._cond.wait_for(lambda: self.active < self.limit)
            self.active += 1

    async def leave(self) -> None:
        async with self._cond:
            self.active -= 1
            self._cond.notify()


@dataclass(eq=False)
class Upstream:
    host: str
    broken: bool = False
    last_used: float = field(default_factory=time.monotonic)

    async def post(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.broken:
            raise ConnectionError(self.host)
        await asyncio.sleep(0)
        return {"host": self.host, "status": 200, "text": str(body.get("prompt", ""))}

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        for token in str(body.get("prompt", "")).split():
            await asyncio.sleep(0)
            yield token


class UpstreamPool:
    def __init__(self, hosts: list[str]) -> None:
        self._idle = [Upstream(h) for h in hosts]
        self.checked_out = 0

    async def lease(self) -> Upstream:
        while not self._idle:
            await asyncio.sleep(0.01)
        self.checked_out += 1
        return self._idle.pop()

    def restore(self, conn: Upstream) -> None:
        self.checked_out -= 1
        conn.last_used = time.monotonic()
        self._idle.append(conn)

    def lease_nowait(self) -> Optional[Upstream]:
        if not self._idle:
            return None
        conn = self._idle.pop()  # leak: a broken connection is taken from the idle list and dropped
        if conn.broken:
            return None
        self.checked_out += 1
        return conn


class SessionTable:
    def __init__(self) -> None:
        self.pinned: dict[str, Upstream] = {}

    def bind(self, sid: str, conn: Upstream) -> None:
        self.pinned[sid] = conn

    def unbind(self, sid: str) -> Optional[Upstream]:
        return self.pinned.pop(sid, None)


class Gateway:
    def __init__(self, gate: PermitGate, pool: UpstreamPool, sessions: SessionTable) -> None:
        self.gate = gate
        self.pool = pool
        self.sessions = sessions
        self.tasks: set[asyncio.Task[None]] = set()

    async def completions(self, body: dict[str, Any]) -> dict[str, Any]:
        await self.gate.enter()  # clean: near miss, every return passes through finally
        try:
            conn = await self.pool.lease()  # leak: the handled connection error answers 502 without restore
            try:
                answer = await conn.post(body)
            except ConnectionError:
                return {"status": 502}
            self.pool.restore(conn)
            return answer
        finally:
            await self.gate.leave()

    async def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.gate.try_enter():  # leak: a body without messages is answered 400 while the permit stays taken
            return {"status": 429}
        if not body.get("messages"):
            return {"status": 400}
        conn = await self.pool.lease()  # clean: near miss, both the error answer and the good one restore it
        try:
            answer = await conn.post(body)
        except ConnectionError:
            answer = {"status": 502}
        finally:
            self.pool.restore(conn)
            await self.gate.leave()
        return answer

    async def embeddings(self, inputs: list[str]) -> dict[str, Any]:
        if not self.gate.try_enter():  # clean: near miss, refused means not held, finally leaves otherwise
            return {"status": 429}
        try:
            if not inputs:
                return {"status": 400}
            return {"status": 200, "count": len(inputs)}
        finally:
            await self.gate.leave()

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        conn = await self.pool.lease()  # clean: near miss, cancellation returns through finally
        try:
            async for token in conn.stream(body):
                if token == "<stop>":
                    return
                yield token
        except asyncio.CancelledError:
            logger.info("client went away")
            raise
        finally:
            self.pool.restore(conn)

    async def hedged(self, body: dict[str, Any], delay: float) -> dict[str, Any]:
        first = await self.pool.lease()  # clean: near miss, restored on the quick way and on the slow way
        task = asyncio.ensure_future(first.post(body))
        done, _ = await asyncio.wait({task}, timeout=delay)
        if done:
            self.pool.restore(first)
            return task.result()
        second = await self.pool.lease()  # leak: only first is restored after the hedge, second never
        backup = asyncio.ensure_future(second.post(body))
        done, pending = await asyncio.wait({task, backup}, return_when=asyncio.FIRST_COMPLETED)
        for other in pending:
            other.cancel()
        self.pool.restore(first)
        return done.pop().result()

    async def open_session(self, sid: str) -> dict[str, Any]:
        if sid in self.sessions.pinned:
            return {"status": 409}
        conn = await self.pool.lease()  # clean: near miss, bound to the session, a lost race restores it, close_session restores it later
        if sid in self.sessions.pinned:
            self.pool.restore(conn)
            return {"status": 409}
        self.sessions.bind(sid, conn)
        return {"status": 201}

    def close_session(self, sid: str) -> bool:
        conn = self.sessions.unbind(sid)
        if conn is None:
            return False
        self.pool.restore(conn)
        return True

    def rebind(self, sid: str) -> bool:
        conn = self.pool.lease_nowait()  # leak: binding over a live session loses the connection bound before
        if conn is None:
            return False
        self.sessions.bind(sid, conn)
        return True

    async def fire_and_forget(self, body: dict[str, Any]) -> None:
        await self.gate.enter()  # clean: near miss, the task created below leaves the gate in its finally
        task = asyncio.create_task(self._background(body))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _background(self, body: dict[str, Any]) -> None:
        try:
            conn = self.pool.lease_nowait()  # clean: near miss, None-checked and restored before the post's result is used
            if conn is None:
                return
            try:
                await conn.post(body)
            except ConnectionError:
                logger.warning("background post to %s failed", conn.host)
            finally:
                self.pool.restore(conn)
        finally:
            await self.gate.leave()

    async def shutdown(self) -> None:
        await asyncio.gather(*self.tasks)
        for sid in list(self.sessions.pinned):
            self.close_session(sid)
