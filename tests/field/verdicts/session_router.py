"""Async front-end: picks a replica, holds a slot on it for the duration of a request."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Optional

log = logging.getLogger("router")


class Overloaded(Exception):
    pass


class Replica:
    def __init__(self, url: str, slots: int) -> None:
        self.url = url
        self.capacity = slots
        self.in_use = 0
        self.healthy = True

    def try_lock_slot(self) -> bool:
        if self.in_use >= self.capacity:
            return False
        self.in_use += 1
        return True

    def unlock_slot(self) -> None:
        assert self.in_use > 0
        self.in_use -= 1


class ConnPool:
    def __init__(self, limit: int) -> None:
        self._conns = [object() for _ in range(limit)]
        self._cv = asyncio.Condition()

    async def get_conn(self) -> object:
        async with self._cv:
            while not self._conns:
                await self._cv.wait()
            return self._conns.pop()

    async def put_conn(self, conn: object) -> None:
        async with self._cv:
            self._conns.append(conn)
            self._cv.notify()

    @asynccontextmanager
    async def conn(self) -> AsyncIterator[object]:
        c = await self.get_conn()  # clean: put back in finally
        try:
            yield c
        finally:
            await self.put_conn(c)


class Router:
    def __init__(self, replicas: list[Replica], conns: ConnPool, max_tenants: int = 64) -> None:
        self.replicas = replicas
        self.conns = conns
        self.tenant_sem: dict[str, asyncio.Semaphore] = {}
        self.admission = asyncio.Semaphore(max_tenants)
        self.sticky: dict[str, Replica] = {}
        self.health_conn: Optional[object] = None
        self._ids = itertools.count()

    def pick(self) -> Optional[Replica]:
        for r in sorted(self.replicas, key=lambda r: r.in_use):
            if r.try_lock_slot():  # leak: an unhealthy replica is skipped with its slot locked
                if not r.healthy:
                    continue
                return r
        return None

    def pick_healthy(self) -> Optional[Replica]:
        for r in random.sample(self.replicas, len(self.replicas)):
            if r.healthy and r.try_lock_slot():  # clean: near miss, health is tested first, the locked replica is returned
                return r
        return None

    async def _call(self, conn: object, url: str, body: str) -> str:
        await asyncio.sleep(0)
        return f"{url}:{len(body)}"

    async def forward(self, body: str) -> str:
        r = self.pick_healthy()  # clean: None raises, otherwise unlocked in finally
        if r is None:
            raise Overloaded()
        try:
            async with self.conns.conn() as c:  # clean: async with
                return await self._call(c, r.url, body)
        finally:
            r.unlock_slot()

    async def forward_cached(self, body: str, cache: dict[str, str]) -> str:
        r = self.pick_healthy()  # leak: a cache hit returns with the slot still locked
        if r is None:
            raise Overloaded()
        if body in cache:
            return cache[body]
        conn = await self.conns.get_conn()  # clean: put back after the call
        cache[body] = await self._call(conn, r.url, body)
        await self.conns.put_conn(conn)
        r.unlock_slot()
        return cache[body]

    async def forward_retry(self, body: str, attempts: int = 3) -> str:
        for n in range(attempts):
            conn = await self.conns.get_conn()  # leak: the timeout handler goes to the next attempt without put_conn
            try:
                out = await asyncio.wait_for(self._call(conn, "any", body), 1.0)
            except asyncio.TimeoutError:
                log.warning("attempt %d timed out", n)
                continue
            await self.conns.put_conn(conn)
            return out
        raise Overloaded()

    async def forward_retry2(self, body: str, attempts: int = 3) -> str:
        for n in range(attempts):
            conn = await self.conns.get_conn()  # clean: near miss, finally runs on continue and on return
            try:
                return await asyncio.wait_for(self._call(conn, "any", body), 1.0)
            except asyncio.TimeoutError:
                continue
            finally:
                await self.conns.put_conn(conn)
        raise Overloaded()

    def bind(self, user: str) -> Replica:
        if user in self.sticky:
            return self.sticky[user]
        r = self.pick_healthy()  # clean: sticky keeps it until unbind
        if r is None:
            raise Overloaded()
        self.sticky[user] = r
        return r

    def unbind(self, user: str) -> None:
        r = self.sticky.pop(user, None)
        if r is not None:
            r.unlock_slot()

    async def admit(self, tenant: str, body: str) -> str:
        await self.admission.acquire()  # leak: empty body is answered without release
        if not body:
            return ""
        out = await self.forward(body)
        self.admission.release()
        return out

    async def admit_tenant(self, tenant: str, body: str) -> str:
        sem = self.tenant_sem.setdefault(tenant, asyncio.Semaphore(2))
        await sem.acquire()  # clean: near miss, handler and normal path both release
        try:
            out = await self.forward(body)
        except Overloaded:
            sem.release()
            return "retry later"
        sem.release()
        return out

    async def start_health(self) -> None:
        if self.health_conn is not None:
            return
        self.health_conn = await self.conns.get_conn()  # clean: near miss, guarded against a second start, stop puts it back

    async def stop(self) -> None:
        for user in list(self.sticky):
            self.unbind(user)
        if self.health_conn is not None:
            await self.conns.put_conn(self.health_conn)
            self.health_conn = None

    async def broadcast(self, body: str) -> list[str]:
        conns = [await self.conns.get_conn() for _ in self.replicas]  # leak: connections of unhealthy replicas are not put back
        outs = []
        for c, r in zip(conns, self.replicas):
            if r.healthy:
                outs.append(await self._call(c, r.url, body))
                await self.conns.put_conn(c)
        return outs
