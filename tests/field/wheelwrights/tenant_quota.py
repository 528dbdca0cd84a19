"""Admission for the multi-tenant scoring service (asyncio).

A request needs a permit of its tenant and a number of token credits of the cluster.
Permits are semaphores made on demand; credits are a plain counter with waiters.
"""
from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from typing import AsyncIterator, Awaitable, Callable

log = logging.getLogger("quota")


class Rejected(Exception):
    pass


class Credits:
    def __init__(self, total: int) -> None:
        self.left = total
        self._waiters: deque[tuple[int, asyncio.Future]] = deque()

    def spend_nowait(self, n: int) -> bool:
        if self._waiters or self.left < n:
            return False
        self.left -= n
        return True

    async def spend(self, n: int) -> None:
        if self.spend_nowait(n):  # clean: the credits are the caller's
            return
        fut = asyncio.get_running_loop().create_future()
        self._waiters.append((n, fut))
        try:
            await fut
        except asyncio.CancelledError:
            if fut.done() and not fut.cancelled():
                self.earn(n)
            raise

    def earn(self, n: int) -> None:
        self.left += n
        while self._waiters and self._waiters[0][0] <= self.left:
            need, fut = self._waiters.popleft()
            if fut.cancelled():
                continue
            self.left -= need
            fut.set_result(None)


@dataclass
class Ticket:
    tenant: str
    credits: int
    live: bool = True


class Admission:
    def __init__(self, credits: Credits, per_tenant: int) -> None:
        self.credits = credits
        self.per_tenant = per_tenant
        self.banned: set[str] = set()
        self._sems: dict[str, asyncio.Semaphore] = {}

    def _sem(self, tenant: str) -> asyncio.Semaphore:
        return self._sems.setdefault(tenant, asyncio.Semaphore(self.per_tenant))

    async def enter(self, tenant: str, n: int) -> Ticket:
        sem = self._sem(tenant)
        await sem.acquire()  # clean: near miss, released when the credits are refused, else the ticket's
        if not self.credits.spend_nowait(n):  # clean: recorded in the ticket
            sem.release()
            raise Rejected(f"{tenant}: no credits")
        return Ticket(tenant, n)

    async def enter_patient(self, tenant: str, n: int, timeout: float) -> Ticket | None:
        sem = self._sem(tenant)
        await sem.acquire()  # leak: not released when the wait for credits times out
        try:
            await asyncio.wait_for(self.credits.spend(n), timeout)  # clean: recorded in the ticket
        except asyncio.TimeoutError:
            log.info("%s: gave up after %.1fs", tenant, timeout)
            return None
        return Ticket(tenant, n)

    async def enter_screened(self, tenant: str, n: int) -> Ticket | None:
        await self.credits.spend(n)  # leak: not earned back when the tenant is banned
        await self._sem(tenant).acquire()  # clean: near miss, released for a banned tenant, else the ticket's
        if tenant in self.banned:
            self._sem(tenant).release()
            return None
        return Ticket(tenant, n)

    def leave(self, t: Ticket) -> None:
        if not t.live:
            return
        t.live = False
        self.credits.earn(t.credits)
        self._sem(t.tenant).release()

    @contextlib.asynccontextmanager
    async def admitted(self, tenant: str, n: int) -> AsyncIterator[Ticket]:
        t = await self.enter(tenant, n)  # clean: left in finally
        try:
            yield t
        finally:
            self.leave(t)


class Gateway:
    def __init__(self, adm: Admission, score: Callable[[bytes], Awaitable[bytes]]) -> None:
        self.adm = adm
        self.score = score
        self.streams: dict[str, Ticket] = {}
        self.tasks: set[asyncio.Task] = set()

    async def handle(self, tenant: str, body: bytes) -> bytes:
        async with self.adm.admitted(tenant, len(body)):  # clean: with block
            return await self.score(body)

    async def handle_batch(self, tenant: str, bodies: list[bytes]) -> list[bytes]:
        out = []
        for b in bodies:
            t = await self.adm.enter(tenant, max(len(b), 1))  # leak: continue on an empty body skips leave
            if not b:
                out.append(b"")
                continue
            try:
                out.append(await self.score(b))
            finally:
                self.adm.leave(t)
        return out

    async def handle_retry(self, tenant: str, body: bytes, attempts: int = 3) -> bytes | None:
        for i in range(attempts):
            t = await self.adm.enter_patient(tenant, len(body), 0.5)  # leak: the ConnectionError branch goes round without leave
            if t is None:
                continue
            try:
                out = await self.score(body)
            except ConnectionError:
                await asyncio.sleep(0.05 * 2**i)
                continue
            self.adm.leave(t)
            return out
        return None

    async def fire_and_forget(self, tenant: str, body: bytes) -> None:
        t = await self.adm.enter(tenant, len(body))  # clean: near miss, the task's done callback leaves
        task = asyncio.create_task(self.score(body))
        self.tasks.add(task)

        def done(task: asyncio.Task) -> None:
            self.tasks.discard(task)
            self.adm.leave(t)

        task.add_done_callback(done)

    # --- streams ---
    async def open_stream(self, sid: str, tenant: str) -> None:
        t = await self.adm.enter(tenant, 64)  # leak: close_stream of an idle stream drops the ticket
        prev = self.streams.get(sid)
        self.streams[sid] = t
        if prev is not None:
            self.adm.leave(prev)

    def close_stream(self, sid: str, idle: bool = False) -> None:
        t = self.streams.pop(sid, None)
        if t is None or idle:
            return
        self.adm.leave(t)
