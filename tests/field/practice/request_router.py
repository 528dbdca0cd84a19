"""Asyncio front end which spreads requests over engine replicas."""
import asyncio
import logging
import random
from collections import deque
from typing import Any, AsyncIterator, Awaitable, Callable, Optional

log = logging.getLogger("router")


class Replica:
    def __init__(self, url: str, capacity: int):
        self.url = url
        self.capacity = capacity
        self.load = 0
        self.healthy = True


class SessionPool:
    """Keep-alive sessions, handed out newest first."""

    def __init__(self, make: Callable[[str], Any], size: int):
        self._make = make
        self._idle: dict[str, deque] = {}
        self._size = size

    async def checkout(self, url: str) -> Any:
        q = self._idle.setdefault(url, deque())
        if q:
            return q.pop()
        return self._make(url)

    def checkin(self, url: str, sess: Any) -> None:
        q = self._idle.setdefault(url, deque())
        if len(q) < self._size:
            q.append(sess)


class Router:
    def __init__(self, replicas: list[Replica], sessions: SessionPool, max_parallel: int = 256):
        self.replicas = replicas
        self.sessions = sessions
        self.gate = asyncio.Semaphore(max_parallel)
        self.swap_lock = asyncio.Lock()
        self.sticky: dict[str, Replica] = {}

    # Replica bookkeeping -------------------------------------------------
    def reserve_replica(self) -> Optional[Replica]:
        alive = [r for r in self.replicas if r.healthy and r.load < r.capacity]
        if not alive:
            return None
        r = min(random.sample(alive, min(2, len(alive))), key=lambda r: r.load)
        r.load += 1
        return r

    def unreserve_replica(self, r: Replica) -> None:
        r.load -= 1

    # Request paths -------------------------------------------------------
    async def generate(self, prompt: str) -> Optional[str]:
        async with self.gate:
            replica = self.reserve_replica()  # clean: unreserved in finally
            if replica is None:
                return None
            try:
                sess = await self.sessions.checkout(replica.url)  # leak: an error status returns before checkin
                status, text = await sess.post("/generate", prompt)
                if status != 200:
                    log.warning("%s answered %d", replica.url, status)
                    return None
                self.sessions.checkin(replica.url, sess)
                return text
            finally:
                self.unreserve_replica(replica)

    async def stream(self, prompt: str) -> AsyncIterator[str]:
        replica = self.reserve_replica()  # clean: near miss, the generator's finally also runs on break
        if replica is None:
            return
        sess = await self.sessions.checkout(replica.url)  # clean: same finally
        try:
            async for chunk in sess.stream(prompt):
                if chunk == "[DONE]":
                    return
                yield chunk
        finally:
            self.sessions.checkin(replica.url, sess)
            self.unreserve_replica(replica)

    async def generate_sticky(self, user: str, prompt: str) -> Optional[str]:
        replica = self.sticky.get(user)
        if replica is None:
            replica = self.reserve_replica()  # clean: held in the sticky table, forget() unreserves
            if replica is None:
                return None
            self.sticky[user] = replica
        sess = await self.sessions.checkout(replica.url)  # clean: no way round the checkin
        _, text = await sess.post("/generate", prompt)
        self.sessions.checkin(replica.url, sess)
        return text

    def forget(self, user: str) -> None:
        replica = self.sticky.pop(user, None)
        if replica is not None:
            self.unreserve_replica(replica)

    async def with_retry(self, prompt: str, attempts: int = 3) -> str:
        for i in range(attempts):
            replica = self.reserve_replica()  # leak: the handler goes to the next attempt without unreserve
            if replica is None:
                await asyncio.sleep(0.05 * 2 ** i)
                continue
            try:
                text = await self._call(replica, prompt)
            except ConnectionError:
                replica.healthy = False
                continue
            self.unreserve_replica(replica)
            return text
        raise RuntimeError("all attempts failed")

    async def _call(self, replica: Replica, prompt: str) -> str:
        sess = await self.sessions.checkout(replica.url)  # clean: finally
        try:
            return (await sess.post("/generate", prompt))[1]
        finally:
            self.sessions.checkin(replica.url, sess)

    async def hedge(self, prompt: str) -> str:
        first = self.reserve_replica()  # clean: unreserved after the race
        if first is None:
            raise RuntimeError("overloaded")
        second = self.reserve_replica()  # leak: only the load of the first is lowered again
        racers: list[Awaitable[str]] = [self._call(first, prompt)]
        if second is not None:
            racers.append(self._call(second, prompt))
        done, _ = await asyncio.wait([asyncio.ensure_future(r) for r in racers], return_when=asyncio.FIRST_COMPLETED)
        self.unreserve_replica(first)
        return done.pop().result()

    async def swap_weights(self, version: str) -> bool:
        await self.swap_lock.acquire()  # leak: an empty version returns under the lock
        if not version:
            return False
        for r in self.replicas:
            await self._call(r, f"/load/{version}")
        self.swap_lock.release()
        return True

    async def drain(self, r: Replica) -> None:
        await self.swap_lock.acquire()  # clean: near miss, the loop's return passes the finally
        try:
            while True:
                if r.load == 0:
                    r.healthy = False
                    return
                await asyncio.sleep(0.1)
        finally:
            self.swap_lock.release()

    async def health(self) -> dict[str, bool]:
        out = {}
        for r in self.replicas:
            sess = await self.sessions.checkout(r.url)  # leak: unhealthy replicas are noted and skipped
            status, _ = await sess.get("/health")
            out[r.url] = r.healthy = status == 200
            if not r.healthy:
                continue
            self.sessions.checkin(r.url, sess)
        return out

    async def throttle(self, n: int) -> None:
        for _ in range(n):
            await self.gate.acquire()  # clean: near miss, counted and released in the second loop
        await asyncio.sleep(1.0)
        for _ in range(n):
            self.gate.release()
