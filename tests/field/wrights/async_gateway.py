"""Admission control of the HTTP gateway: permits, per-tenant quotas, upstream connections."""
from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import AsyncIterator, Awaitable, Callable

logger = logging.getLogger("gateway")


class Overloaded(Exception):
    pass


@dataclass
class Job:
    job_id: str
    tenant: str
    prompt: str
    stream: bool = False
    permit: "Permit | None" = None


@dataclass
class Permit:
    serial: int
    tenant: str


class PermitPool:
    """Bounded number of requests in flight; grant() waits, try_grant() does not."""

    def __init__(self, limit: int) -> None:
        self._sem = asyncio.Semaphore(limit)
        self._serial = 0
        self.active: dict[int, Permit] = {}

    def _issue(self, tenant: str) -> Permit:
        self._serial += 1
        permit = Permit(self._serial, tenant)
        self.active[permit.serial] = permit
        return permit

    async def grant(self, tenant: str) -> Permit:
        await self._sem.acquire()  # clean: belongs to the issued permit, revoke() releases
        return self._issue(tenant)

    async def try_grant(self, tenant: str) -> Permit | None:
        if self._sem.locked():
            return None
        return await self.grant(tenant)  # clean: returned

    def revoke(self, permit: Permit) -> None:
        if self.active.pop(permit.serial, None) is not None:
            self._sem.release()

    @asynccontextmanager
    async def granted(self, tenant: str) -> AsyncIterator[Permit]:
        permit = await self.grant(tenant)  # clean: revoked in the finally
        try:
            yield permit
        finally:
            self.revoke(permit)


@dataclass
class Connection:
    index: int
    broken: bool = False


class ConnectionPool:
    def __init__(self, size: int) -> None:
        self._idle = [Connection(i) for i in range(size)]

    def connect(self) -> Connection | None:
        return self._idle.pop() if self._idle else None

    def disconnect(self, conn: Connection) -> None:
        conn.broken = False
        self._idle.append(conn)


Upstream = Callable[[Connection, str], Awaitable[str]]


@dataclass
class Gateway:
    permits: PermitPool
    conns: ConnectionPool
    upstream: Upstream
    blocked: set[str] = field(default_factory=set)
    parked: dict[str, Job] = field(default_factory=dict)
    tasks: set[asyncio.Task] = field(default_factory=set)

    async def handle(self, job: Job) -> str:
        async with self.permits.granted(job.tenant):  # clean: scoped by the async with
            conn = self.conns.connect()  # leak: an upstream time-out is caught and answered with the connection out
            if conn is None:
                raise Overloaded(job.tenant)
            try:
                answer = await asyncio.wait_for(self.upstream(conn, job.prompt), 30)
            except asyncio.TimeoutError:
                return "timeout"
            self.conns.disconnect(conn)
            return answer

    async def handle_now(self, job: Job) -> str | None:
        permit = await self.permits.try_grant(job.tenant)  # leak: a blocked tenant is turned away after the permit was granted
        if permit is None:
            return None
        if job.tenant in self.blocked:
            logger.info("tenant %s is blocked", job.tenant)
            return None
        try:
            return await self._call(job)
        finally:
            self.permits.revoke(permit)

    async def _call(self, job: Job) -> str:
        conn = self.conns.connect()  # clean: near miss, nothing is held on the raise, the finally covers the rest
        if conn is None:
            raise Overloaded(job.tenant)
        try:
            return await self.upstream(conn, job.prompt)
        finally:
            self.conns.disconnect(conn)

    async def _run(self, job: Job, permit: Permit) -> None:
        try:
            await self._call(job)
        except Overloaded:
            logger.warning("no connection for %s", job.job_id)
        finally:
            self.permits.revoke(permit)

    async def spawn(self, job: Job) -> None:
        permit = await self.permits.grant(job.tenant)  # clean: near miss, moves into the task, which revokes it
        task = asyncio.ensure_future(self._run(job, permit))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def spawn_background(self, job: Job) -> None:
        permit = await self.permits.grant(job.tenant)  # leak: the task's coroutine is not given the permit and the callback only discards the task
        logger.debug("permit %d for %s", permit.serial, job.job_id)
        task = asyncio.ensure_future(self._call(job))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def spawn_batch(self, jobs: list[Job]) -> None:
        for job in jobs:
            permit = await self.permits.grant(job.tenant)  # clean: near miss, revoked by the done callback with a bound default
            task = asyncio.ensure_future(self._call(job))
            task.add_done_callback(lambda t, p=permit: self.permits.revoke(p))
            self.tasks.add(task)

    async def park(self, job: Job) -> None:
        job.permit = await self.permits.grant(job.tenant)  # leak: unpark() forgets a cancelled job with its permit
        self.parked[job.job_id] = job

    def unpark(self, job_id: str, cancelled: bool = False) -> Job | None:
        job = self.parked.pop(job_id, None)
        if job is None or cancelled:
            return None
        if job.permit is not None:
            self.permits.revoke(job.permit)
            job.permit = None
        return job

    async def race(self, job: Job) -> str | None:
        """Ask two upstreams, take the first answer."""
        a = self.conns.connect()  # clean: disconnected on every way below
        if a is None:
            return None
        b = self.conns.connect()  # clean: near miss, without a second the first is used alone
        if b is None:
            try:
                return await self.upstream(a, job.prompt)
            finally:
                self.conns.disconnect(a)
        try:
            done, rest = await asyncio.wait(
                [asyncio.ensure_future(self.upstream(c, job.prompt)) for c in (a, b)],
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in rest:
                task.cancel()
            return next(iter(done)).result()
        finally:
            for conn in (a, b):
                self.conns.disconnect(conn)

    async def retry(self, job: Job, attempts: int) -> str | None:
        for _ in range(attempts):
            conn = self.conns.connect()  # leak: a failed attempt goes round with the connection out
            if conn is None:
                await asyncio.sleep(0)
                continue
            try:
                answer = await self.upstream(conn, job.prompt)
                self.conns.disconnect(conn)
                return answer
            except ConnectionError:
                conn.broken = True
        return None
