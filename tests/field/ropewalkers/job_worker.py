"""Async worker process: takes jobs from leased queues and runs them under a slot board."""
from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

log = logging.getLogger("worker")


@dataclass
class Slot:
    index: int
    since: float = field(default_factory=time.monotonic)


class SlotBoard:
    """How many jobs may run at once in this process."""

    def __init__(self, n: int) -> None:
        self._open = list(range(n))
        self._waiters: list[asyncio.Future] = []

    async def claim(self) -> Slot:
        while not self._open:
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            await fut
        return Slot(self._open.pop())

    def claim_nowait(self) -> Slot | None:
        return Slot(self._open.pop()) if self._open else None

    def free(self, slot: Slot) -> None:
        self._open.append(slot.index)
        if self._waiters:
            self._waiters.pop(0).set_result(None)


@dataclass
class Job:
    id: str
    kind: str
    body: dict
    cancelled: bool = False
    attempt: int = 0


@dataclass
class JobLease:
    job: Job
    receipt: int


class JobStore:
    """A job under a lease is hidden from other workers until it is acked or nacked."""

    def __init__(self) -> None:
        self._ready: dict[str, list[Job]] = {}
        self._hidden: dict[int, tuple[str, Job]] = {}
        self._receipts = 0

    def put(self, queue: str, job: Job) -> None:
        self._ready.setdefault(queue, []).append(job)

    async def lease_next(self, queue: str) -> JobLease | None:
        ready = self._ready.get(queue)
        if not ready:
            await asyncio.sleep(0.1)
            return None
        self._receipts += 1
        job = ready.pop(0)
        self._hidden[self._receipts] = (queue, job)
        return JobLease(job, self._receipts)

    async def ack(self, lease: JobLease) -> None:
        self._hidden.pop(lease.receipt, None)

    async def nack(self, lease: JobLease) -> None:
        entry = self._hidden.pop(lease.receipt, None)
        if entry is not None:
            queue, job = entry
            job.attempt += 1
            self._ready[queue].append(job)


Handler = Callable[[Job], Awaitable[bool]]


class Worker:
    def __init__(self, store: JobStore, board: SlotBoard, handlers: dict[str, Handler]) -> None:
        self.store = store
        self.board = board
        self.handlers = handlers
        self.stopping = False
        self._tasks: set[asyncio.Task] = set()
        self._inflight: dict[str, JobLease] = {}
        self._parked: dict[str, JobLease] = {}

    async def serve(self, queue: str) -> None:
        while not self.stopping:
            slot = await self.board.claim()  # clean: freed when idle, otherwise by the task
            lease = await self.store.lease_next(queue)  # clean: handed to the task
            if lease is None:
                self.board.free(slot)
                continue
            task = asyncio.create_task(self._run(slot, lease))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, slot: Slot, lease: JobLease) -> None:
        try:
            ok = await self.handlers[lease.job.kind](lease.job)
            if ok:
                await self.store.ack(lease)
            else:
                await self.store.nack(lease)
        finally:
            self.board.free(slot)

    async def serve_serial(self, queue: str) -> int:
        """One job after the other, for queues whose order matters."""
        done = 0
        while not self.stopping:
            lease = await self.store.lease_next(queue)  # leak: a job of unknown kind is skipped, not nacked
            if lease is None:
                break
            handler = self.handlers.get(lease.job.kind)
            if handler is None:
                log.error("no handler for %s (%s)", lease.job.kind, lease.job.id)
                continue
            if await handler(lease.job):
                await self.store.ack(lease)
                done += 1
            else:
                await self.store.nack(lease)
        return done

    async def serve_priority(self, queues: list[str]) -> bool:
        """Takes one job of the first queue which has any."""
        lease = None
        for queue in queues:
            lease = await self.store.lease_next(queue)  # clean: near miss, only a None is overwritten
            if lease is not None:
                break
        if lease is None:
            return False
        slot = await self.board.claim()  # leak: the cancelled branch acks the job and keeps the slot
        if lease.job.cancelled:
            await self.store.ack(lease)
            return True
        ok = await self.handlers[lease.job.kind](lease.job)
        await (self.store.ack(lease) if ok else self.store.nack(lease))
        self.board.free(slot)
        return True

    async def start_background(self, queue: str) -> asyncio.Task | None:
        slot = self.board.claim_nowait()  # leak: the background task never frees its slot
        if slot is None:
            return None
        lease = await self.store.lease_next(queue)  # clean: nothing, or acked by the task
        if lease is None:
            self.board.free(slot)
            return None
        return asyncio.create_task(self._run_background(lease, slot))

    async def _run_background(self, lease: JobLease, slot: Slot) -> None:
        log.info("background job %s on slot %d", lease.job.id, slot.index)
        await self.handlers[lease.job.kind](lease.job)
        await self.store.ack(lease)
        log.info("background job %s took %.1fs", lease.job.id, time.monotonic() - slot.since)

    async def begin(self, queue: str) -> str | None:
        """Two-phase protocol used by the remote runner: begin, then complete or abandon."""
        lease = await self.store.lease_next(queue)  # leak: abandon removes the entry without a nack
        if lease is None:
            return None
        self._inflight[lease.job.id] = lease
        return lease.job.id

    async def complete(self, job_id: str) -> None:
        lease = self._inflight.pop(job_id)
        await self.store.ack(lease)

    def abandon(self, job_id: str, reason: str) -> None:
        lease = self._inflight.pop(job_id, None)
        if lease is not None:
            log.warning("job %s abandoned by runner: %s", lease.job.id, reason)

    async def park(self, queue: str) -> None:
        """Jobs which wait for a human; unpark decides what becomes of them."""
        lease = await self.store.lease_next(queue)  # clean: near miss, unpark ends it either way
        if lease is not None:
            self._parked[lease.job.id] = lease

    async def unpark(self, job_id: str, approve: bool) -> None:
        lease = self._parked.pop(job_id)
        if approve:
            await self.handlers[lease.job.kind](lease.job)
            await self.store.ack(lease)
        else:
            await self.store.nack(lease)

    async def batch(self, queue: str, limit: int) -> int:
        leases: list[JobLease] = []
        while len(leases) < limit:
            lease = await self.store.lease_next(queue)  # leak: failed jobs of the batch are not nacked
            if lease is None:
                break
            leases.append(lease)
        results = await asyncio.gather(*(self.handlers[x.job.kind](x.job) for x in leases))
        for lease, ok in zip(leases, results):
            if ok:
                await self.store.ack(lease)
            else:
                log.warning("job %s failed at attempt %d", lease.job.id, lease.job.attempt)
        return sum(results)

    async def drain(self, queue: str) -> int:
        taken: list[JobLease] = []
        while (lease := await self.store.lease_next(queue)) is not None:  # clean: all are acked below
            taken.append(lease)
        for lease in taken:
            await self.store.ack(lease)
        return len(taken)

    @contextlib.asynccontextmanager
    async def exclusive(self, n: int):
        """Holds n slots, so that a migration has the process to itself."""
        slots = [await self.board.claim() for _ in range(n)]  # clean: freed in the finally
        try:
            yield len(slots)
        finally:
            for slot in slots:
                self.board.free(slot)

    async def migrate(self, steps: list[Callable[[], Awaitable[None]]]) -> None:
        async with self.exclusive(4) as width:  # clean: context manager
            log.info("migration on %d slots", width)
            for step in steps:
                await step()

    async def warm_up(self) -> float:
        """Measures how long a claim takes at the moment; feeds the autoscaler."""
        started = time.monotonic()
        await self.board.claim()  # leak: the slot is thrown away
        return time.monotonic() - started
