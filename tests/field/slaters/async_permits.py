"""Bounded asynchronous uploads and evaluation jobs."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Awaitable, Callable, Dict, List, Optional, Set

log = logging.getLogger("jobs.permits")


class TransientError(Exception):
    pass


class PermitPool:
    def __init__(self, permits: int) -> None:
        self.permits = permits
        self._sem = asyncio.Semaphore(permits)
        self.taken = 0

    async def grant(self) -> "Permit":
        await self._sem.acquire()  # clean: revoked through the permit
        self.taken += 1
        return Permit(self)

    def revoke(self, permit: "Permit") -> None:
        if permit.valid:
            permit.valid = False
            self.taken -= 1
            self._sem.release()

    async def grant_within(self, seconds: float) -> Optional["Permit"]:
        try:
            await asyncio.wait_for(self._sem.acquire(), seconds)  # clean: near miss, a timeout took nothing
        except asyncio.TimeoutError:
            return None
        self.taken += 1
        return Permit(self)

    async def grant_if(self, admit: Callable[[int], bool]) -> Optional["Permit"]:
        await self._sem.acquire()  # leak: refused admission returns None with the semaphore down
        if not admit(self.taken):
            return None
        self.taken += 1
        return Permit(self)


@dataclass
class Permit:
    pool: PermitPool
    valid: bool = True

    def done(self) -> None:
        self.pool.revoke(self)


@dataclass
class UploadJob:
    key: str
    body: bytes
    permit: Optional[Permit] = None
    attempts: int = 0


Put = Callable[[str, bytes], Awaitable[None]]


class Uploader:
    def __init__(self, pool: PermitPool, put: Put, max_attempts: int = 3) -> None:
        self.pool = pool
        self.put = put
        self.max_attempts = max_attempts
        self.tasks: Set[asyncio.Task] = set()
        self.failed: List[str] = []

    async def submit(self, job: UploadJob) -> None:
        job.permit = await self.pool.grant()  # clean: near miss, moved into the job, _run revokes in finally
        task = asyncio.create_task(self._run(job))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _run(self, job: UploadJob) -> None:
        try:
            while job.attempts < self.max_attempts:
                job.attempts += 1
                try:
                    await self.put(job.key, job.body)
                    return
                except TransientError:
                    await asyncio.sleep(0)
            self.failed.append(job.key)
        finally:
            if job.permit is not None:
                job.permit.done()
                job.permit = None

    async def upload_now(self, key: str, body: bytes) -> bool:
        for attempt in range(self.max_attempts):
            permit = await self.pool.grant()  # leak: each failed attempt takes another permit without revoking this one
            try:
                await self.put(key, body)
            except TransientError as e:
                log.info("attempt %d for %s: %s", attempt, key, e)
                continue
            permit.done()
            return True
        return False

    async def upload_small(self, key: str, body: bytes) -> bool:
        for attempt in range(self.max_attempts):
            permit = await self.pool.grant()  # clean: near miss, finally runs on continue and return
            try:
                await self.put(key, body)
                return True
            except TransientError:
                continue
            finally:
                permit.done()
        return False

    async def upload_best_effort(self, key: str, body: bytes) -> bool:
        permit = await self.pool.grant_within(0.5)  # leak: the empty-body return skips done
        if permit is None:
            return False
        if not body:
            return True
        try:
            await self.put(key, body)
        finally:
            permit.done()
        return True

    async def drain(self) -> None:
        while self.tasks:
            await asyncio.gather(*list(self.tasks))


@dataclass
class EvalRequest:
    name: str
    priority: int
    permit: Optional[Permit] = None
    result: Optional[float] = None


@dataclass
class EvalQueue:
    pool: PermitPool
    waiting: List[EvalRequest] = field(default_factory=list)
    running: Dict[str, EvalRequest] = field(default_factory=dict)

    def enqueue(self, req: EvalRequest) -> None:
        self.waiting.append(req)
        self.waiting.sort(key=lambda r: -r.priority)

    async def start_next(self) -> Optional[EvalRequest]:
        if not self.waiting or self.waiting[0].name in self.running:
            return None
        req = self.waiting.pop(0)
        req.permit = await self.pool.grant()  # clean: kept in running until finish or cancel
        self.running[req.name] = req
        return req

    def finish(self, name: str, value: float) -> None:
        req = self.running.pop(name)
        req.result = value
        req.permit.done()
        req.permit = None

    def cancel(self, name: str) -> bool:
        req = self.running.pop(name, None)
        if req is None:
            return False
        if req.permit is not None:
            req.permit.done()
            req.permit = None
        return True


class PriorityLane:
    """Holds one permit back so that urgent evaluations start at once."""

    def __init__(self, pool: PermitPool) -> None:
        self.pool = pool
        self.held: Optional[Permit] = None
        self.active: Dict[str, Permit] = {}

    async def arm(self) -> None:
        if self.held is None:
            self.held = await self.pool.grant()  # leak: start_urgent moves it into active, where expire removes it without done

    def disarm(self) -> None:
        if self.held is not None:
            self.held.done()
            self.held = None

    async def start_urgent(self, name: str) -> None:
        permit = self.held
        self.held = None
        if permit is None:
            permit = await self.pool.grant()  # leak: expire removes the entry without done
        self.active[name] = permit

    def complete(self, name: str) -> None:
        self.active.pop(name).done()

    def expire(self, names: List[str]) -> int:
        n = 0
        for name in names:
            if self.active.pop(name, None) is not None:
                n += 1
        return n


async def run_guarded(pool: PermitPool, lock: asyncio.Lock, work: Callable[[], Awaitable[int]]) -> int:
    await lock.acquire()  # clean: released in finally
    try:
        permit = await pool.grant()  # leak: negative results return before done
        value = await work()
        if value < 0:
            return 0
        permit.done()
        return value
    finally:
        lock.release()


async def throttle(pool: PermitPool, names: List[str], probe: Callable[[str], Awaitable[bool]]) -> List[str]:
    alive: List[str] = []
    permits: List[Permit] = []
    for n in names:
        permits.append(await pool.grant())  # clean: near miss, the list is emptied whenever it is full and at the end
        if await probe(n):
            alive.append(n)
        if len(permits) >= pool.permits:
            while permits:
                permits.pop().done()
    for p in permits:
        p.done()
    return alive


async def main() -> None:
    pool = PermitPool(3)

    async def put(key: str, body: bytes) -> None:
        await asyncio.sleep(0)

    async def probe(name: str) -> bool:
        return name != "b"

    async def work() -> int:
        return 5

    up = Uploader(pool, put)
    for i in range(4):
        await up.submit(UploadJob(f"k{i}", b"x"))
    await up.drain()
    print(await up.upload_now("a", b"1"), await up.upload_small("b", b"2"), await up.upload_best_effort("c", b"3"))
    q = EvalQueue(pool)
    q.enqueue(EvalRequest("mmlu", 1))
    req = await q.start_next()  # clean: finished next
    if req is not None:
        q.finish(req.name, 0.5)
    lane = PriorityLane(pool)
    await lane.arm()
    await lane.start_urgent("hot")
    lane.complete("hot")
    print(await run_guarded(pool, asyncio.Lock(), work), await throttle(pool, ["a", "b", "c", "d"], probe), pool.taken)


if __name__ == "__main__":
    asyncio.run(main())
