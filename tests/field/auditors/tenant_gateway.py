from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from typing import AsyncIterator, Optional

logger = logging.getLogger(__name__)


class BackendUnavailable(Exception): ...


class TenantPermits:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._cond = asyncio.Condition()

    async def acquire(self) -> None:
        async with self._cond:
            await self._cond.wait_for(lambda: self._held < self._limit)
            self._held += 1

    def try_acquire(self) -> bool:
        if self._held >= self._limit:
            return False
        self._held += 1
        return True

    async def release(self) -> None:
        async with self._cond:
            self._held -= 1
            self._cond.notify()


class BackendSession:
    def __init__(self, url: str) -> None:
        self.url = url
        self.healthy = True

    async def post(self, prompt: str) -> str:
        if not self.healthy:
            raise BackendUnavailable(self.url)
        await asyncio.sleep(0)
        return prompt.upper()


class SessionPool:
    def __init__(self, url: str, size: int) -> None:
        self._idle: deque[BackendSession] = deque(BackendSession(url) for _ in range(size))

    def checkout(self) -> Optional[BackendSession]:
        return self._idle.popleft() if self._idle else None

    def checkin(self, session: BackendSession) -> None:
        session.healthy = True
        self._idle.append(session)


class TokenBudget:
    def __init__(self, total: int) -> None:
        self.remaining = total

    def reserve(self, tokens: int) -> bool:
        if tokens > self.remaining:
            return False
        self.remaining -= tokens
        return True

    def refund(self, tokens: int) -> None:
        self.remaining += tokens


@dataclass
class Call:
    tenant: str
    prompt: str
    max_tokens: int


class Gateway:
    def __init__(self, sessions: SessionPool, permits: TenantPermits, budget: TokenBudget) -> None:
        self.sessions = sessions
        self.permits = permits
        self.budget = budget
        self.sticky: dict[str, BackendSession] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    async def complete(self, call: Call) -> Optional[str]:
        await self.permits.acquire()  # leak: no idle session means return None with the tenant's permit held
        session = self.sessions.checkout()  # clean: near miss, the finally checks it in for answers and errors alike
        if session is None:
            return None
        try:
            return await session.post(call.prompt)
        except BackendUnavailable:
            return None
        finally:
            self.sessions.checkin(session)
            await self.permits.release()

    async def complete_budgeted(self, call: Call) -> Optional[str]:
        if not self.budget.reserve(call.max_tokens):  # leak: a cancelled client is answered with None and no refund
            return None
        try:
            async with self.session() as backend:  # clean: the context manager checks it in
                answer = await backend.post(call.prompt)
        except BackendUnavailable:
            self.budget.refund(call.max_tokens)
            return None
        except asyncio.CancelledError:
            logger.info("tenant %s went away", call.tenant)
            return None
        self.budget.refund(call.max_tokens)
        return answer

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[BackendSession]:
        session = self.sessions.checkout()  # clean: checked in by the finally, and None raises before anything is held
        if session is None:
            raise BackendUnavailable("no idle session")
        try:
            yield session
        finally:
            self.sessions.checkin(session)

    async def chat_turn(self, call: Call) -> Optional[str]:
        session = self.sticky.get(call.tenant)
        if session is None:
            session = self.sessions.checkout()  # clean: near miss, stays with the tenant in sticky until end_chat
            if session is None:
                return None
            self.sticky[call.tenant] = session
        try:
            return await session.post(call.prompt)
        except BackendUnavailable:
            return None

    async def rebind_chat(self, tenant: str) -> bool:
        session = self.sessions.checkout()  # leak: stored over the tenant's present sticky session, which is never checked in
        if session is None:
            return False
        self.sticky[tenant] = session
        return True

    def end_chat(self, tenant: str) -> None:
        session = self.sticky.pop(tenant, None)
        if session is not None:
            self.sessions.checkin(session)

    async def hedge(self, call: Call) -> Optional[str]:
        first = self.sessions.checkout()  # clean: near miss, checked in when there is no second and in the finally otherwise
        if first is None:
            return None
        second = self.sessions.checkout()  # clean: the finally checks in both
        if second is None:
            self.sessions.checkin(first)
            return None
        tasks = [asyncio.ensure_future(s.post(call.prompt)) for s in (first, second)]
        try:
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            winner = done.pop()
            return None if winner.exception() else winner.result()
        finally:
            self.sessions.checkin(first)
            self.sessions.checkin(second)

    def fire_and_forget(self, call: Call) -> bool:
        if not self.permits.try_acquire():  # clean: near miss, handed to the background task whose finally releases it
            return False
        task = asyncio.get_running_loop().create_task(self._background(call))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return True

    async def _background(self, call: Call) -> None:
        try:
            async with self.session() as backend:  # clean: near miss, the swallowed error still leaves through the context manager
                await backend.post(call.prompt)
        except BackendUnavailable:
            pass
        finally:
            await self.permits.release()

    async def probe(self, rounds: int) -> int:
        alive = 0
        for _ in range(rounds):
            session = self.sessions.checkout()  # leak: a session found unhealthy breaks out of the loop without a checkin
            if session is None:
                break
            if not session.healthy:
                break
            alive += 1
            self.sessions.checkin(session)
        return alive
