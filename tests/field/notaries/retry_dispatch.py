"""Dispatching jobs to leased workers: attempts, hedges and settlement over several methods."""
from __future__ import annotations

import asyncio
import enum
from collections import deque
from dataclasses import dataclass, field


class WorkerTable:
    def __init__(self, names: list[str]) -> None:
        self._idle = deque(names)
        self._busy: set[str] = set()

    def reserve(self) -> str | None:
        if not self._idle:
            return None
        name = self._idle.popleft()
        self._busy.add(name)
        return name

    def vacate(self, name: str) -> None:
        self._busy.remove(name)
        self._idle.append(name)


class State(enum.Enum):
    QUEUED = 0
    SENT = 1
    DONE = 2
    FAILED = 3
    ABANDONED = 4


@dataclass
class Job:
    ident: int
    payload: bytes
    worker: str | None = None
    backup: str | None = None
    state: State = State.QUEUED
    attempts: int = 0
    log: list[str] = field(default_factory=list)


class SimpleDispatcher:
    """Retries by leasing another worker; the last one is vacated at settlement."""

    def __init__(self, table: WorkerTable, transport) -> None:
        self.table = table
        self.transport = transport

    async def run(self, job: Job) -> bool:
        for attempt in range(3):
            job.worker = self.table.reserve()  # leak: a failed send loops and overwrites, settle vacates one
            if job.worker is None:
                await asyncio.sleep(0.05)
                continue
            job.attempts = attempt + 1
            if await self.transport.send(job.worker, job.payload):
                job.state = State.DONE
                break
            job.log.append(f"{job.worker}: rejected")
        self._settle(job)
        return job.state is State.DONE

    def _settle(self, job: Job) -> None:
        if job.worker is not None:
            self.table.vacate(job.worker)
            job.worker = None


class CarefulDispatcher:
    def __init__(self, table: WorkerTable, transport) -> None:
        self.table = table
        self.transport = transport

    async def run(self, job: Job) -> bool:
        for _ in range(3):
            job.worker = self.table.reserve()  # clean: near miss, _after_failure() vacates before each retry
            if job.worker is None:
                await asyncio.sleep(0.05)
                continue
            if await self.transport.send(job.worker, job.payload):
                job.state = State.DONE
                self.table.vacate(job.worker)
                return True
            self._after_failure(job)
        return False

    def _after_failure(self, job: Job) -> None:
        job.attempts += 1
        job.log.append(f"{job.worker}: attempt {job.attempts}")
        self.table.vacate(job.worker)
        job.worker = None


class QueueDispatcher:
    """launch() leases, on_reply() and on_timeout() end the job."""

    def __init__(self, table: WorkerTable, transport, max_attempts: int) -> None:
        self.table = table
        self.transport = transport
        self.max_attempts = max_attempts
        self.waiting: deque[Job] = deque()
        self.live: dict[int, Job] = {}

    def launch(self) -> int:
        started = 0
        while self.waiting:
            worker = self.table.reserve()  # leak: on_timeout() gives up on the last attempt with it in hand
            if worker is None:
                break
            job = self.waiting.popleft()
            job.worker, job.state = worker, State.SENT
            self.live[job.ident] = job
            self.transport.post(worker, job.payload)
            started += 1
        return started

    def on_reply(self, ident: int) -> None:
        job = self.live.pop(ident)
        job.state = State.DONE
        self.table.vacate(job.worker)
        job.worker = None

    def on_timeout(self, ident: int) -> None:
        job = self.live.pop(ident)
        job.attempts += 1
        if job.attempts >= self.max_attempts:
            job.state = State.FAILED
            job.worker = None
            return
        self.table.vacate(job.worker)
        job.worker, job.state = None, State.QUEUED
        self.waiting.append(job)


class StickyDispatcher:
    """Keeps the worker over the retries of one job; `done` and `abandon` both end it."""

    def __init__(self, table: WorkerTable, transport) -> None:
        self.table = table
        self.transport = transport
        self.live: dict[int, Job] = {}

    def launch(self, job: Job) -> bool:
        if job.worker is None:
            job.worker = self.table.reserve()  # clean: near miss, kept on retry and vacated by _end()
        if job.worker is None:
            return False
        job.state = State.SENT
        self.live[job.ident] = job
        self.transport.post(job.worker, job.payload)
        return True

    def retry(self, job: Job) -> bool:
        job.attempts += 1
        return self.launch(job)

    def done(self, ident: int) -> None:
        self._end(self.live.pop(ident), State.DONE)

    def abandon(self, ident: int) -> None:
        self._end(self.live.pop(ident), State.ABANDONED)

    def _end(self, job: Job, state: State) -> None:
        job.state = state
        self.table.vacate(job.worker)
        job.worker = None


class HedgedDispatcher:
    """Sends to a second worker when the first is slow."""

    def __init__(self, table: WorkerTable, transport, patience: float) -> None:
        self.table = table
        self.transport = transport
        self.patience = patience

    async def run(self, job: Job) -> bool:
        job.worker = self.table.reserve()  # clean: near miss, _release() vacates it whoever wins
        if job.worker is None:
            return False
        ok = await self.transport.send_within(job.worker, job.payload, self.patience)
        if not ok:
            job.backup = self.table.reserve()  # leak: _release() only looks at job.worker
            if job.backup is not None:
                ok = await self.transport.send(job.backup, job.payload)
        job.state = State.DONE if ok else State.FAILED
        self._release(job)
        return ok

    async def run_twice(self, job: Job) -> int:
        job.worker = self.table.reserve()  # clean: vacated by _release(), None included
        job.backup = self.table.reserve()  # clean: near miss, vacated here before _release()
        answers = 0
        for name in (job.worker, job.backup):
            if name is not None:
                answers += await self.transport.send(name, job.payload)
        if job.backup is not None:
            self.table.vacate(job.backup)
            job.backup = None
        self._release(job)
        return answers

    def _release(self, job: Job) -> None:
        if job.worker is None:
            return
        self.table.vacate(job.worker)
        job.worker = None
