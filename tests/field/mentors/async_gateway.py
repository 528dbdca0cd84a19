"""Gateway in front of a fleet of engines: permits per backend, sessions, streaming."""
from __future__ import annotations

import asyncio
import logging
import uuid
from collections import defaultdict
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, AsyncIterator

log = logging.getLogger(__name__)


class BackendError(Exception):
    pass


class Permits:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._cond = asyncio.Condition()

    async def acquire(self) -> None:
        async with self._cond:
            await self._cond.wait_for(lambda: self.used < self.limit)
            self.used += 1

    def try_acquire(self) -> bool:
        if self.used >= self.limit:
            return False
        self.used += 1
        return True

    async def release(self) -> None:
        async with self._cond:
            self.used -= 1
            self._cond.notify()


@dataclass(eq=False)
class Conn:
    url: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    broken: bool = False

    async def post(self, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        if self.broken:
            raise BackendError(self.url)
        return {"text": body["prompt"], "url": self.url}


class ConnPool:
    def __init__(self, url: str, size: int) -> None:
        self.url = url
        self.size = size
        self.busy = 0
        self._idle: list[Conn] = []

    def checkout(self) -> Conn | None:
        if self.busy >= self.size:
            return None
        self.busy += 1
        return self._idle.pop() if self._idle else Conn(self.url)

    def checkin(self, conn: Conn) -> None:
        self.busy -= 1
        if not conn.broken:
            self._idle.append(conn)


class Gateway:
    def __init__(self, urls: list[str], per_backend: int = 32) -> None:
        self.permits = {u: Permits(per_backend) for u in urls}
        self.pools = {u: ConnPool(u, per_backend) for u in urls}
        self.sticky: dict[str, Conn] = {}
        self.tasks: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self.failures: defaultdict[str, int] = defaultdict(int)

    @asynccontextmanager
    async def connection(self, url: str) -> AsyncIterator[Conn | None]:
        conn = self.pools[url].checkout()  # clean: near miss, None is skipped, else checked in by finally
        try:
            yield conn
        finally:
            if conn is not None:
                self.pools[url].checkin(conn)

    async def generate(self, url: str, body: dict[str, Any]) -> dict[str, Any] | None:
        permit = self.permits[url]
        await permit.acquire()  # leak: kept when all connections are busy
        conn = self.pools[url].checkout()  # clean: checked in by finally
        if conn is None:
            self.failures[url] += 1
            return None
        try:
            return await conn.post(body)
        except BackendError:
            conn.broken = True
            return None
        finally:
            self.pools[url].checkin(conn)
            await permit.release()

    async def generate_any(self, body: dict[str, Any]) -> dict[str, Any] | None:
        for url, permit in self.permits.items():
            if not permit.try_acquire():  # clean: near miss, every way through the round below releases it
                continue
            try:
                async with self.connection(url) as conn:  # clean: `continue` and return leave the block in order
                    if conn is None:
                        continue
                    return await conn.post(body)
            except BackendError:
                self.failures[url] += 1
            finally:
                await permit.release()
        return None

    async def open_session(self, sid: str, url: str) -> bool:
        conn = self.pools[url].checkout()  # leak: a sid that is open already has its connection overwritten
        if conn is None:
            return False
        self.sticky[sid] = conn
        return True

    async def session_call(self, sid: str, body: dict[str, Any]) -> dict[str, Any] | None:
        conn = self.sticky.get(sid)
        if conn is None:
            return None
        try:
            return await conn.post(body)
        except BackendError:
            conn.broken = True
            await self.close_session(sid)
            return None

    async def close_session(self, sid: str) -> None:
        conn = self.sticky.pop(sid, None)
        if conn is not None:
            self.pools[conn.url].checkin(conn)

    async def move_session(self, sid: str, url: str) -> bool:
        conn = self.pools[url].checkout()  # clean: near miss, the old connection is checked in before the new one takes its place
        if conn is None:
            return False
        await self.close_session(sid)
        self.sticky[sid] = conn
        return True

    async def stream(self, url: str, prompts: list[str]) -> AsyncIterator[str]:
        conn = self.pools[url].checkout()  # leak: the early return after a backend error skips the checkin
        if conn is None:
            return
        for p in prompts:
            try:
                out = await conn.post({"prompt": p})
            except BackendError:
                conn.broken = True
                log.warning("stream of %s broken", url)
                return
            yield out["text"]
        self.pools[url].checkin(conn)

    async def timed(self, url: str, body: dict[str, Any], timeout: float) -> dict[str, Any] | None:
        conn = self.pools[url].checkout()  # leak: the handled timeout returns with the connection out
        if conn is None:
            return None
        try:
            out = await asyncio.wait_for(conn.post(body), timeout)
        except asyncio.TimeoutError:
            self.failures[url] += 1
            return None
        except BackendError:
            conn.broken = True
            out = {}
        self.pools[url].checkin(conn)
        return out or None

    async def submit(self, rid: str, url: str, body: dict[str, Any]) -> bool:
        if not self.permits[url].try_acquire():  # clean: near miss, the done callback releases it, also if the task is cancelled
            return False

        async def run() -> dict[str, Any]:
            async with self.connection(url) as conn:  # clean: checked in at the end of the block
                return {} if conn is None else await conn.post(body)

        task = asyncio.create_task(run())
        task.add_done_callback(lambda _: asyncio.ensure_future(self.permits[url].release()))
        self.tasks[rid] = task
        return True

    async def warmup(self, url: str, n: int) -> int:
        ready = 0
        for _ in range(n):
            await self.permits[url].acquire()  # leak: the `continue` for a missing connection skips the release
            async with self.connection(url) as conn:  # clean: near miss, the `continue` leaves this block in order
                if conn is None:
                    continue
                await conn.post({"prompt": ""})
                ready += 1
            await self.permits[url].release()
        return ready

    async def aclose(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        for sid in list(self.sticky):
            await self.close_session(sid)
