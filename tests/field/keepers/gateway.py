"""Async gateway in front of engine replicas: permits, upstream sessions and stream mailboxes."""
from __future__ import annotations

import asyncio
import logging
from typing import Any, AsyncIterator, Callable, Dict, List, Optional

logger = logging.getLogger(__name__)


class Upstream:
    def __init__(self, url: str) -> None:
        self.url = url
        self.healthy = True

    async def post(self, body: Dict[str, Any]) -> Dict[str, Any]:
        await asyncio.sleep(0)
        return {"text": body["prompt"], "status": 200 if self.healthy else 503}


class SessionPool:
    def __init__(self, urls: List[str], per_url: int) -> None:
        self._idle: "asyncio.Queue[Upstream]" = asyncio.Queue()
        for url in urls * per_url:
            self._idle.put_nowait(Upstream(url))

    async def rent(self) -> Upstream:
        return await self._idle.get()

    def try_rent(self) -> Optional[Upstream]:
        try:
            return self._idle.get_nowait()
        except asyncio.QueueEmpty:
            return None

    def return_(self, session: Upstream) -> None:
        self._idle.put_nowait(session)


class Quota:
    """Token budget per tenant; debit and refund must balance over a request."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used: Dict[str, int] = {}

    def debit(self, tenant: str, n: int) -> bool:
        if self.used.get(tenant, 0) + n > self.limit:
            return False
        self.used[tenant] = self.used.get(tenant, 0) + n
        return True

    def refund(self, tenant: str, n: int) -> None:
        self.used[tenant] -= n


class Gateway:
    def __init__(self, pool: SessionPool, quota: Quota, concurrency: int) -> None:
        self.pool = pool
        self.quota = quota
        self.permits = asyncio.Semaphore(concurrency)
        self.sticky: Dict[str, Upstream] = {}
        self.tasks: Dict[str, "asyncio.Task[Any]"] = {}

    async def complete(self, tenant: str, body: Dict[str, Any]) -> Dict[str, Any]:
        n = int(body.get("max_tokens", 16))
        if not self.quota.debit(tenant, n):  # clean: near miss, a refused debit took nothing, else the finally refunds
            return {"status": 429}
        try:
            async with self.permits:
                session = await self.pool.rent()  # clean: returned in the finally, also upon cancellation
                try:
                    return await session.post(body)
                finally:
                    self.pool.return_(session)
        finally:
            self.quota.refund(tenant, n)

    async def complete_fast(self, tenant: str, body: Dict[str, Any]) -> Dict[str, Any]:
        n = int(body.get("max_tokens", 16))
        if not self.quota.debit(tenant, n):  # leak: no refund when no session is idle
            return {"status": 429}
        session = self.pool.try_rent()  # clean: None on the early way, returned in the finally on the other
        if session is None:
            return {"status": 503}
        try:
            return await session.post(body)
        finally:
            self.pool.return_(session)
            self.quota.refund(tenant, n)

    async def with_timeout(self, body: Dict[str, Any], seconds: float) -> Optional[Dict[str, Any]]:
        session = await self.pool.rent()  # leak: a timeout is answered with None and the session stays out
        try:
            reply = await asyncio.wait_for(session.post(body), seconds)
        except asyncio.TimeoutError:
            logger.warning("%s timed out", session.url)
            return None
        self.pool.return_(session)
        return reply

    async def with_retry(self, body: Dict[str, Any], tries: int) -> Dict[str, Any]:
        reply: Dict[str, Any] = {"status": 503}
        for attempt in range(tries):
            session = await self.pool.rent()  # leak: a session with a bad answer is left out when the loop goes round
            reply = await session.post(body)
            if reply["status"] != 200:
                await asyncio.sleep(0.05 * attempt)
                continue
            self.pool.return_(session)
            break
        return reply

    async def any_healthy(self, tries: int) -> bool:
        for _ in range(tries):
            session = self.pool.try_rent()  # clean: near miss, returned ahead of the health decision
            if session is None:
                await asyncio.sleep(0.01)
                continue
            good = session.healthy
            self.pool.return_(session)
            if good:
                return True
        return False

    async def open_sticky(self, key: str) -> Upstream:
        if key in self.sticky:
            return self.sticky[key]
        session = await self.pool.rent()  # clean: near miss, a racing winner makes this one go back, else close_sticky returns it
        if key in self.sticky:
            self.pool.return_(session)
            return self.sticky[key]
        self.sticky[key] = session
        return session

    def close_sticky(self, key: str) -> None:
        session = self.sticky.pop(key, None)
        if session is not None:
            self.pool.return_(session)

    async def _background(self, session: Upstream, body: Dict[str, Any], key: str) -> None:
        try:
            await session.post(body)
        except asyncio.CancelledError:
            logger.info("background %s cancelled", key)
        finally:
            self.pool.return_(session)
            self.permits.release()
            self.tasks.pop(key, None)

    async def submit(self, key: str, body: Dict[str, Any]) -> bool:
        if key in self.tasks:
            return False
        await self.permits.acquire()  # clean: near miss, handed to the task whose finally releases it
        session = self.pool.try_rent()  # clean: near miss, handed to the task, whose finally returns it
        if session is None:
            self.permits.release()
            return False
        self.tasks[key] = asyncio.create_task(self._background(session, body, key))
        await asyncio.sleep(0)
        return True

    async def submit_batch(self, bodies: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
        await self.permits.acquire()  # leak: an empty batch returns with the permit
        if not bodies:
            return []
        session = await self.pool.rent()  # clean: returned in the finally with the permit
        try:
            return [await session.post(body) for body in bodies]
        finally:
            self.pool.return_(session)
            self.permits.release()
