from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import AsyncIterator, Optional

logger = logging.getLogger("gateway")


class UpstreamError(Exception):
    pass


class PermitPool:
    def __init__(self, limit: int) -> None:
        self._value = limit
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> None:
        while self._value == 0:
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            try:
                await fut
            except asyncio.CancelledError:
                with contextlib.suppress(ValueError):
                    self._waiters.remove(fut)
                self._wake()
                raise
        self._value -= 1

    def try_acquire(self) -> bool:
        if self._value == 0:
            return False
        self._value -= 1
        return True

    def release(self) -> None:
        self._value += 1
        self._wake()

    def _wake(self) -> None:
        while self._waiters and self._value > 0:
            fut = self._waiters.popleft()
            if not fut.done():
                fut.set_result(None)
                break


@dataclass(eq=False)
class Connection:
    backend: str
    healthy: bool = True

    async def post(self, body: dict) -> dict:
        await asyncio.sleep(0)
        if not self.healthy:
            raise UpstreamError(self.backend)
        return {"backend": self.backend, **body}

    async def stream(self, body: dict) -> AsyncIterator[str]:
        for token in body.get("prompt", "").split():
            await asyncio.sleep(0)
            yield token


class ConnectionPool:
    def __init__(self, backend: str, size: int) -> None:
        self.backend = backend
        self._idle = [Connection(backend) for _ in range(size)]

    def checkout(self) -> Optional[Connection]:
        return self._idle.pop() if self._idle else None

    def checkin(self, conn: Connection) -> None:
        if not conn.healthy:
            conn = Connection(self.backend)
        self._idle.append(conn)


@dataclass
class ChatSession:
    session_id: str
    conn: Connection
    turns: list[str] = field(default_factory=list)


class Gateway:
    def __init__(self, pools: dict[str, ConnectionPool], permits: PermitPool) -> None:
        self.pools = pools
        self.permits = permits
        self.sessions: dict[str, ChatSession] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def completion(self, model: str, body: dict) -> Optional[dict]:
        await self.permits.acquire()  # leak: an unknown model or an empty pool answers None with the permit held
        pool = self.pools.get(model)
        if pool is None:
            return None
        conn = pool.checkout()  # clean: near miss, the handler and the ordinary way both run the finally
        if conn is None:
            return None
        try:
            return await conn.post(body)
        except UpstreamError as e:
            logger.warning("upstream: %s", e)
            return None
        finally:
            pool.checkin(conn)
            self.permits.release()

    async def rerank(self, model: str, bodies: list[dict]) -> list[dict]:
        out: list[dict] = []
        pool = self.pools[model]
        for body in bodies:
            conn = pool.checkout()  # clean: near miss, the handler falls through to the checkin
            if conn is None:
                break
            try:
                out.append(await conn.post(body))
            except UpstreamError:
                conn.healthy = False
            pool.checkin(conn)
        return out

    async def stream(self, model: str, body: dict) -> AsyncIterator[str]:
        pool = self.pools[model]
        if not self.permits.try_acquire():  # clean: near miss, the finally of the generator releases it
            return
        try:
            conn = pool.checkout()  # leak: a stop word returns from the generator without the checkin
            if conn is None:
                return
            async for token in conn.stream(body):
                if token in body.get("stop", ()):
                    return
                yield token
            pool.checkin(conn)
        finally:
            self.permits.release()

    async def with_timeout(self, model: str, body: dict, seconds: float) -> Optional[dict]:
        pool = self.pools[model]
        conn = pool.checkout()  # clean: near miss, a timeout is answered after the checkin
        if conn is None:
            return None
        result: Optional[dict] = None
        try:
            result = await asyncio.wait_for(conn.post(body), seconds)
        except (asyncio.TimeoutError, UpstreamError):
            conn.healthy = False
        pool.checkin(conn)
        return result

    async def cancellable(self, model: str, body: dict) -> Optional[dict]:
        await self.permits.acquire()  # leak: the cancelled request is answered with None and keeps the permit
        try:
            await asyncio.sleep(0)
            result = {"model": model, **body}
        except asyncio.CancelledError:
            logger.info("client went away")
            return None
        self.permits.release()
        return result

    def open_session(self, session_id: str, model: str) -> bool:
        conn = self.pools[model].checkout()  # leak: a client that opens its session again replaces the old connection
        if conn is None:
            return False
        self.sessions[session_id] = ChatSession(session_id, conn)
        return True

    def close_session(self, session_id: str) -> None:
        session = self.sessions.pop(session_id, None)
        if session is not None:
            self.pools[session.conn.backend].checkin(session.conn)

    def fire_and_forget(self, model: str, body: dict) -> bool:
        if not self.permits.try_acquire():  # clean: near miss, handed to the task's done callback
            return False
        task = asyncio.create_task(self._background(model, body))
        self._tasks.add(task)
        task.add_done_callback(self._background_done)
        return True

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.permits.release()

    async def _background(self, model: str, body: dict) -> None:
        pool = self.pools[model]
        conn = pool.checkout()  # clean: checked in by the finally
        if conn is None:
            return
        try:
            await conn.post(body)
        except UpstreamError:
            conn.healthy = False
        finally:
            pool.checkin(conn)
