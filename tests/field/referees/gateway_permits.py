"""Async gateway in front of LLM replicas: token budgets, upstream sessions, streaming and cancellation."""
from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, AsyncIterator, Optional

logger = logging.getLogger(__name__)


class UpstreamError(Exception):
    pass


@dataclass
class Session:
    url: str
    opened_at: float
    broken: bool = False

    async def post(self, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        if self.broken:
            raise UpstreamError(self.url)
        return {"text": body.get("prompt", ""), "url": self.url}

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        for word in str(body.get("prompt", "")).split():
            await asyncio.sleep(0)
            yield word


class SessionPool:
    def __init__(self, urls: list[str], per_url: int) -> None:
        self.urls = urls
        self.per_url = per_url
        self.open: dict[str, int] = defaultdict(int)
        self.idle: dict[str, list[Session]] = defaultdict(list)

    async def lease(self, url: str) -> Session:
        while True:
            session = self.try_lease(url)  # clean: near miss, the loop turns round only after None
            if session is not None:
                return session
            await asyncio.sleep(0.005)

    def try_lease(self, url: str) -> Optional[Session]:
        if self.idle[url]:
            return self.idle[url].pop()
        if self.open[url] >= self.per_url:
            return None
        self.open[url] += 1
        return Session(url, time.monotonic())

    def give_back(self, session: Session) -> None:
        if session.broken:
            self.open[session.url] -= 1
            return
        self.idle[session.url].append(session)


class TokenBudget:
    def __init__(self, total: int) -> None:
        self.left = total

    def reserve(self, n: int) -> bool:
        if n > self.left:
            return False
        self.left -= n
        return True

    def refund(self, n: int) -> None:
        self.left += n


class Gateway:
    def __init__(self, pool: SessionPool, budget: TokenBudget, max_streams: int) -> None:
        self.pool = pool
        self.budget = budget
        self.streams = asyncio.Semaphore(max_streams)
        self.sticky: dict[str, Session] = {}
        self._rr = 0

    def _next_url(self) -> str:
        self._rr = (self._rr + 1) % len(self.pool.urls)
        return self.pool.urls[self._rr]

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        cost = len(str(body.get("prompt", ""))) + int(body.get("max_tokens", 16))
        if not self.budget.reserve(cost):  # clean: near miss, every way after the reservation runs through finally
            return {"error": "over budget", "status": 429}
        try:
            for _ in range(3):
                session = await self.pool.lease(self._next_url())  # leak: a failed attempt continues and the next lease rebinds it
                try:
                    out = await session.post(body)
                except UpstreamError:
                    session.broken = True
                    continue
                self.pool.give_back(session)
                return out
            return {"error": "no upstream", "status": 502}
        finally:
            self.budget.refund(cost)

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        await self.streams.acquire()  # clean: near miss, the generator's finally covers an abandoned consumer too
        session = None
        try:
            session = await self.pool.lease(self._next_url())  # clean: given back in finally
            async for chunk in session.stream(body):
                yield chunk
        finally:
            if session is not None:
                self.pool.give_back(session)
            self.streams.release()

    async def chat(self, conversation: str, body: dict[str, Any]) -> dict[str, Any]:
        session = self.sticky.get(conversation)
        if session is None or session.broken:
            session = await self.pool.lease(self._next_url())  # leak: a broken sticky session is replaced in the table and its place in the pool is not returned
            self.sticky[conversation] = session
        try:
            return await session.post(body)
        except UpstreamError:
            session.broken = True
            return {"error": "upstream", "status": 502}

    def end_chat(self, conversation: str) -> None:
        session = self.sticky.pop(conversation, None)
        if session is not None:
            self.pool.give_back(session)

    async def complete_with_timeout(self, body: dict[str, Any], timeout: float) -> Optional[dict[str, Any]]:
        session = await self.pool.lease(self._next_url())  # clean: near miss, timeout marks it broken and both ways give it back
        try:
            out = await asyncio.wait_for(session.post(body), timeout)
        except (asyncio.TimeoutError, UpstreamError):
            session.broken = True
            self.pool.give_back(session)
            return None
        except asyncio.CancelledError:
            self.pool.give_back(session)
            raise
        self.pool.give_back(session)
        return out

    async def hedge(self, body: dict[str, Any], delay: float) -> Optional[dict[str, Any]]:
        first = await self.pool.lease(self._next_url())  # clean: near miss, _run_and_return gives it back when its task ends
        tasks = [asyncio.create_task(self._run_and_return(first, body))]
        done, _ = await asyncio.wait(tasks, timeout=delay)
        if not done:
            second = self.pool.try_lease(self._next_url())  # clean: near miss, moved into the second task
            if second is not None:
                tasks.append(asyncio.create_task(self._run_and_return(second, body)))
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            await asyncio.wait(pending)
        return done.pop().result()

    async def _run_and_return(self, session: Session, body: dict[str, Any]) -> Optional[dict[str, Any]]:
        try:
            return await session.post(body)
        except UpstreamError:
            session.broken = True
            return None
        finally:
            self.pool.give_back(session)

    async def embed(self, texts: list[str]) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        for text in texts:
            if not self.budget.reserve(len(text)):  # leak: only the longest text is refunded after the loop
                break
            out.append({"len": len(text)})
        if out:
            self.budget.refund(max(item["len"] for item in out))
        return out

    async def health(self) -> dict[str, bool]:
        status: dict[str, bool] = {}
        for url in self.pool.urls:
            session = self.pool.try_lease(url)  # leak: an old session is skipped by continue and stays out
            if session is None:
                status[url] = True
                continue
            if time.monotonic() - session.opened_at > 300:
                status[url] = False
                continue
            status[url] = not session.broken
            self.pool.give_back(session)
        return status
