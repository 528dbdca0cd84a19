"""Async session pool used by the router to talk to backends."""
import asyncio
import logging
import time
from typing import Awaitable, Callable, Dict, List, Optional, Union

log = logging.getLogger(__name__)


class Session:
    def __init__(self, backend: str):
        self.backend = backend
        self.broken = False
        self.created = time.monotonic()

    async def post(self, body: dict) -> dict:
        await asyncio.sleep(0)
        if self.broken:
            raise ConnectionError(self.backend)
        return {"status": 200, "body": body}


class SessionPool:
    def __init__(self, backend: str, size: int):
        self.backend = backend
        self._idle: "asyncio.LifoQueue[Session]" = asyncio.LifoQueue()
        for _ in range(size):
            self._idle.put_nowait(Session(backend))

    async def obtain(self) -> Session:
        return await self._idle.get()  # clean: goes to the caller

    def obtain_nowait(self) -> Optional[Session]:
        if self._idle.empty():
            return None
        return self._idle.get_nowait()  # clean: goes to the caller

    def recycle(self, s: Session) -> None:
        if s.broken:
            s = Session(self.backend)
        self._idle.put_nowait(s)


class Lease:
    def __init__(self, pool: SessionPool):
        self.pool = pool
        self.session: Optional[Session] = None

    async def __aenter__(self) -> Session:
        self.session = await self.pool.obtain()  # leak: __aexit__ returns early for a broken session
        return self.session

    async def __aexit__(self, et, ev, tb) -> None:
        assert self.session is not None
        if self.session.broken:
            log.warning("session to %s is broken", self.pool.backend)
            return
        self.pool.recycle(self.session)
        self.session = None


class RoutedLease(Lease):
    async def __aenter__(self) -> Session:
        self.session = await self.pool.obtain()  # clean: overridden __aexit__ always recycles
        return self.session

    async def __aexit__(self, et, ev, tb) -> None:
        s, self.session = self.session, None
        if s is not None:
            self.pool.recycle(s)


class Router:
    def __init__(self, pools: Dict[str, SessionPool], max_parallel: int = 8):
        self.pools = pools
        self.sem = asyncio.Semaphore(max_parallel)
        self.sticky: Dict[str, Session] = {}

    async def call(self, backend: str, body: dict) -> dict:
        pool = self.pools[backend]
        s = await pool.obtain()  # clean: finally recycles
        try:
            return await s.post(body)
        finally:
            pool.recycle(s)

    async def call_ok(self, backend: str, body: dict) -> Optional[dict]:
        pool = self.pools[backend]
        s = await pool.obtain()  # leak: ConnectionError handler returns None and forgets the session
        try:
            r = await s.post(body)
        except ConnectionError:
            return None
        pool.recycle(s)
        return r

    async def call_retry(self, backend: str, body: dict, n: int = 3) -> dict:
        pool = self.pools[backend]
        for attempt in range(n):
            s = await pool.obtain()  # clean: near miss, else clause and handler both recycle
            try:
                r = await s.post(body)
            except ConnectionError:
                pool.recycle(s)
                await asyncio.sleep(0.01 * attempt)
            else:
                pool.recycle(s)
                return r
        raise ConnectionError(backend)

    async def hedge(self, a: str, b: str, body: dict) -> dict:
        sa = await self.pools[a].obtain()  # clean: recycled below
        sb = self.pools[b].obtain_nowait()  # leak: recycled only when the first answer is bad
        r = await sa.post(body)
        self.pools[a].recycle(sa)
        if r["status"] != 200 and sb is not None:
            r = await sb.post(body)
            self.pools[b].recycle(sb)
        return r

    async def limited(self, backend: str, body: dict) -> Optional[dict]:
        await self.sem.acquire()  # leak: unknown backend returns with the permit
        if backend not in self.pools:
            return None
        r = await self.call(backend, body)
        self.sem.release()
        return r

    async def limited_cm(self, backend: str, body: dict) -> Optional[dict]:
        async with self.sem:  # clean: async with
            if backend not in self.pools:
                return None
            return await self.call(backend, body)

    async def pin_user(self, user: str, backend: str) -> Session:
        if user not in self.sticky:
            s = await self.pools[backend].obtain()  # clean: near miss, the loser of a race recycles, else kept for unpin_user
            if user in self.sticky:
                self.pools[backend].recycle(s)
            else:
                self.sticky[user] = s
        return self.sticky[user]

    def unpin_user(self, user: str, backend: str) -> None:
        s = self.sticky.pop(user, None)
        if s is not None:
            self.pools[backend].recycle(s)

    async def probe(self, names: List[str]) -> Dict[str, bool]:
        up: Dict[str, bool] = {}
        for name in names:
            s = self.pools[name].obtain_nowait()  # clean: near miss, the continue is for None only
            if s is None:
                continue
            up[name] = not s.broken
            self.pools[name].recycle(s)
        return up
