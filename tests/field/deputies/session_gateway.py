"""Async gateway in front of several inference replicas."""
from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Awaitable, Callable

Transport = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
logger = logging.getLogger(__name__)


class Overloaded(Exception):
    pass


class UpstreamError(Exception):
    pass


@dataclass(eq=False)
class Session:
    endpoint: str
    transport: Transport
    healthy: bool = True
    last_used: float = field(default_factory=time.monotonic)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self.transport(path, body)
        except ConnectionError as e:
            raise UpstreamError(self.endpoint) from e

    async def chunks(self, body: dict[str, Any]) -> AsyncIterator[str]:
        for word in str(body.get("prompt", "")).split():
            await asyncio.sleep(0)
            yield word


class SessionPool:
    def __init__(self, endpoint: str, limit: int, transport: Transport) -> None:
        self.endpoint = endpoint
        self.transport = transport
        self.limit = limit
        self.out = 0
        self._idle: deque[Session] = deque()
        self._cond = asyncio.Condition()

    async def checkout(self) -> Session:
        async with self._cond:
            await self._cond.wait_for(lambda: self.out < self.limit)
            self.out += 1
            return self._idle.popleft() if self._idle else Session(self.endpoint, self.transport)

    def checkout_nowait(self) -> Session | None:
        if self.out >= self.limit:
            return None
        self.out += 1
        return self._idle.popleft() if self._idle else Session(self.endpoint, self.transport)

    async def checkin(self, session: Session) -> None:
        async with self._cond:
            self.out -= 1
            if session.healthy:
                session.last_used = time.monotonic()
                self._idle.append(session)
            self._cond.notify()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Session]:
        session = await self.checkout()  # clean: checked in in the finally
        try:
            yield session
        finally:
            await self.checkin(session)


class Permits:
    def __init__(self, n: int) -> None:
        self.left = n

    def take(self) -> bool:
        if self.left <= 0:
            return False
        self.left -= 1
        return True

    def give(self) -> None:
        self.left += 1


class Gateway:
    def __init__(self, pools: list[SessionPool], max_inflight: int = 64) -> None:
        self.pools = pools
        self.permits = Permits(max_inflight)
        self.sticky: dict[str, tuple[SessionPool, Session]] = {}
        self.tasks: set[asyncio.Task] = set()

    def _pick(self) -> SessionPool:
        return min(self.pools, key=lambda p: p.out / p.limit)

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.permits.take():  # clean: given back in the finally
            raise Overloaded
        try:
            async with self._pick().lease() as session:  # clean: the context manager checks it in
                return await session.post("/v1/completions", body)
        finally:
            self.permits.give()

    async def embed(self, texts: list[str]) -> dict[str, Any] | None:
        if not self.permits.take():  # leak: the early return for an empty input keeps the permit
            raise Overloaded
        texts = [t for t in texts if t.strip()]
        if not texts:
            return None
        try:
            async with self._pick().lease() as session:  # clean: the context manager checks it in
                return await session.post("/v1/embeddings", {"input": texts})
        finally:
            self.permits.give()

    async def complete_with_retry(self, body: dict[str, Any], attempts: int = 3) -> dict[str, Any] | None:
        for i in range(attempts):
            pool = self._pick()
            session = await pool.checkout()  # leak: a failed attempt goes round the loop without checking the session in
            try:
                result = await session.post("/v1/completions", body)
            except UpstreamError:
                session.healthy = False
                await asyncio.sleep(0.05 * 2**i)
                continue
            await pool.checkin(session)
            return result
        return None

    async def hedge(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """Tries every replica that has room, in order of load."""
        for pool in sorted(self.pools, key=lambda p: p.out):
            session = pool.checkout_nowait()  # clean: near miss, both the break-out and the failed attempt pass the finally
            if session is None:
                continue
            try:
                return await session.post("/v1/completions", body)
            except UpstreamError:
                session.healthy = False
                continue
            finally:
                await pool.checkin(session)
        return None

    async def open_chat(self, user: str) -> Session:
        known = self.sticky.get(user)
        if known is not None and known[1].healthy:
            return known[1]
        pool = self._pick()
        session = await pool.checkout()  # leak: an unhealthy session of the same user is overwritten in sticky, never checked in
        self.sticky[user] = (pool, session)
        return session

    async def chat(self, user: str, body: dict[str, Any]) -> dict[str, Any] | None:
        session = await self.open_chat(user)  # clean: near miss, kept in sticky on purpose, close_chat() and shutdown() check it in
        try:
            return await session.post("/v1/chat", body)
        except UpstreamError:
            session.healthy = False
            return None

    async def close_chat(self, user: str) -> None:
        entry = self.sticky.pop(user, None)
        if entry is not None:
            pool, session = entry
            await pool.checkin(session)

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        if not self.permits.take():  # clean: near miss, given back in the finally of the generator
            raise Overloaded
        pool = self._pick()
        try:
            session = await pool.checkout()  # clean: near miss, the inner finally checks it in also when the reader stops early
            try:
                async for chunk in session.chunks(body):
                    yield chunk
            finally:
                await pool.checkin(session)
        finally:
            self.permits.give()

    async def stream_until(self, body: dict[str, Any], stop: str) -> AsyncIterator[str]:
        pool = self._pick()
        session = await pool.checkout()  # leak: the return at the stop word passes by the checkin
        async for chunk in session.chunks(body):
            if chunk == stop:
                return
            yield chunk
        await pool.checkin(session)

    def fire_and_forget(self, body: dict[str, Any]) -> bool:
        if not self.permits.take():  # clean: near miss, given back by the task's done callback
            return False
        task = asyncio.ensure_future(self._background(body))
        self.tasks.add(task)
        task.add_done_callback(self._task_done)
        return True

    def _task_done(self, task: asyncio.Task) -> None:
        self.tasks.discard(task)
        self.permits.give()

    async def _background(self, body: dict[str, Any]) -> None:
        pool = self._pick()
        session = await pool.checkout()  # leak: a timeout is handled and logged, and the session is not checked in
        try:
            await asyncio.wait_for(session.post("/v1/log", body), timeout=2.0)
        except (asyncio.TimeoutError, UpstreamError):
            logger.warning("background post to %s failed", pool.endpoint)
            return
        await pool.checkin(session)

    async def shutdown(self) -> None:
        for user in list(self.sticky):
            await self.close_chat(user)
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
