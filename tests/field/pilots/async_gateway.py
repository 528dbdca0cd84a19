from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Awaitable, Callable, Optional

logger = logging.getLogger("gateway")


class PermitPool:
    def __init__(self, limit: int):
        self.limit = limit
        self._in_use = 0
        self._waiters: deque[asyncio.Future] = deque()

    async def acquire(self) -> "Permit":
        while self._in_use >= self.limit:
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            await fut
        self._in_use += 1
        return Permit(self)

    def try_acquire(self) -> Optional["Permit"]:
        if self._in_use >= self.limit:
            return None
        self._in_use += 1
        return Permit(self)

    def _release(self) -> None:
        self._in_use -= 1
        while self._waiters:
            fut = self._waiters.popleft()
            if not fut.done():
                fut.set_result(None)
                break


@dataclass
class Permit:
    pool: PermitPool
    held: bool = True

    def release(self) -> None:
        if self.held:
            self.held = False
            self.pool._release()


@dataclass
class Session:
    session_id: int
    worker: str
    history: list[str] = field(default_factory=list)
    last_used: float = field(default_factory=time.monotonic)


class SessionRegistry:
    def __init__(self, workers: list[str]):
        self.workers = workers
        self._load = {w: 0 for w in workers}
        self._next = 0

    async def open(self) -> Session:
        await asyncio.sleep(0)
        worker = min(self.workers, key=self._load.__getitem__)
        self._load[worker] += 1
        self._next += 1
        return Session(self._next, worker)

    def close(self, session: Session) -> None:
        self._load[session.worker] -= 1


Backend = Callable[[str, str], Awaitable[str]]


class Gateway:
    def __init__(self, permits: PermitPool, registry: SessionRegistry, backend: Backend):
        self.permits = permits
        self.registry = registry
        self.backend = backend
        self.sticky: dict[str, Session] = {}
        self.queue: asyncio.Queue[tuple[Permit, str, asyncio.Future]] = asyncio.Queue()
        self._tasks: set[asyncio.Task] = set()

    async def complete(self, prompt: str) -> str:
        permit = await self.permits.acquire()  # clean: near miss, released in the finally, the timeout included
        try:
            return await asyncio.wait_for(self.backend("any", prompt), 30)
        except asyncio.TimeoutError:
            return ""
        finally:
            permit.release()

    async def complete_on_session(self, prompt: str) -> Optional[str]:
        session = await self.registry.open()  # leak: the handled connection error returns None and the session stays open
        try:
            out = await self.backend(session.worker, prompt)
        except ConnectionError:
            logger.info("worker %s is away", session.worker)
            return None
        self.registry.close(session)
        return out

    async def chat(self, user: str, message: str) -> str:
        session = self.sticky.get(user)
        if session is None:
            session = await self.registry.open()  # clean: near miss, kept in sticky for the user until expire() closes it
            if user in self.sticky:
                self.registry.close(session)
                session = self.sticky[user]
            else:
                self.sticky[user] = session
        session.history.append(message)
        session.last_used = time.monotonic()
        return await self.backend(session.worker, "\n".join(session.history))

    async def rebind(self, user: str) -> Session:
        self.sticky[user] = await self.registry.open()  # leak: the user's former session is overwritten and not closed
        return self.sticky[user]

    def expire(self, idle: float) -> int:
        now = time.monotonic()
        stale = [u for u, s in self.sticky.items() if now - s.last_used > idle]
        for user in stale:
            self.registry.close(self.sticky.pop(user))
        return len(stale)

    async def submit(self, prompt: str) -> "asyncio.Future[str]":
        permit = await self.permits.acquire()  # leak: dispatch() skips queue items whose future was cancelled without releasing their permit
        fut: asyncio.Future = asyncio.get_running_loop().create_future()
        self.queue.put_nowait((permit, prompt, fut))
        return fut

    async def dispatch(self) -> None:
        while True:
            permit, prompt, fut = await self.queue.get()
            if fut.cancelled():
                continue
            try:
                fut.set_result(await self.backend("any", prompt))
            finally:
                permit.release()

    def spawn(self, prompt: str) -> bool:
        permit = self.permits.try_acquire()  # clean: near miss, the done callback releases it for result, error and cancellation
        if permit is None:
            return False
        task = asyncio.ensure_future(self.backend("any", prompt))
        self._tasks.add(task)

        def _done(t: asyncio.Task) -> None:
            self._tasks.discard(t)
            permit.release()

        task.add_done_callback(_done)
        return True

    def spawn_logged(self, prompt: str) -> bool:
        permit = self.permits.try_acquire()  # leak: the callback returns at a cancelled task before the release
        if permit is None:
            return False
        task = asyncio.ensure_future(self.backend("any", prompt))
        self._tasks.add(task)

        def _done(t: asyncio.Task) -> None:
            self._tasks.discard(t)
            if t.cancelled():
                return
            permit.release()
            if t.exception() is not None:
                logger.error("background completion failed: %r", t.exception())

        task.add_done_callback(_done)
        return True

    async def hedge(self, prompt: str, delay: float) -> str:
        first = await self.permits.acquire()  # clean: near miss, the outer finally releases it
        second: Optional[Permit] = None
        tasks = {asyncio.ensure_future(self.backend("primary", prompt))}
        try:
            done, _ = await asyncio.wait(tasks, timeout=delay)
            if not done:
                second = self.permits.try_acquire()  # clean: near miss, the finally releases it if it was had
                if second is not None:
                    tasks.add(asyncio.ensure_future(self.backend("backup", prompt)))
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            first.release()
            if second is not None:
                second.release()

    async def stream(self, prompt: str, parts: int) -> AsyncIterator[str]:
        permit = await self.permits.acquire()  # leak: an empty piece ends the stream before the release
        for i in range(parts):
            piece = await self.backend("any", f"{prompt}#{i}")
            if not piece:
                return
            yield piece
        permit.release()

    async def stream_session(self, prompt: str, parts: int) -> AsyncIterator[str]:
        session = await self.registry.open()  # clean: near miss, closed in the finally on return, exhaustion and aclose
        try:
            for i in range(parts):
                piece = await self.backend(session.worker, f"{prompt}#{i}")
                if not piece:
                    return
                yield piece
        finally:
            self.registry.close(session)

    async def broadcast(self, prompt: str, n: int) -> list[Any]:
        sessions: list[Session] = []
        try:
            for _ in range(n):
                sessions.append(await self.registry.open())  # clean: near miss, all opened so far are closed in the finally
            return await asyncio.gather(*(self.backend(s.worker, prompt) for s in sessions), return_exceptions=True)
        finally:
            for s in sessions:
                self.registry.close(s)
