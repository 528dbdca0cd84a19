"""Evaluation service: checkpoints are scored by a fleet of remote workers.

A worker is leased for one task at a time; GPU quota is counted separately per
tenant.  Everything is asyncio.
"""
from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Awaitable, Callable, Optional

log = logging.getLogger(__name__)


@dataclass
class Worker:
    name: str
    gpus: int
    healthy: bool = True
    served: int = 0

    async def load(self, ckpt: str) -> bool:
        await asyncio.sleep(0)
        return self.healthy

    async def score(self, task: str) -> Optional[dict[str, float]]:
        await asyncio.sleep(0)
        self.served += 1
        return {"acc": 0.0}


class Fleet:
    def __init__(self, workers: list[Worker]):
        self._ready: asyncio.Queue[Worker] = asyncio.Queue()
        for w in workers:
            self._ready.put_nowait(w)
        self.retired: list[Worker] = []

    async def hire(self) -> Worker:
        return await self._ready.get()  # clean: returned to the caller

    async def hire_healthy(self) -> Worker:
        while True:
            worker = await self._ready.get()  # clean: near miss, unhealthy ones move to self.retired for repair()
            if worker.healthy:
                return worker
            self.retired.append(worker)

    async def hire_with(self, gpus: int) -> Optional[Worker]:
        for _ in range(self._ready.qsize()):
            worker = await self._ready.get()  # leak: workers with too few GPUs are not queued again
            if worker.gpus >= gpus:
                return worker
        return None

    def dismiss(self, worker: Worker) -> None:
        self._ready.put_nowait(worker)

    def repair(self) -> int:
        fixed, self.retired = self.retired, []
        for worker in fixed:
            worker.healthy = True
            self._ready.put_nowait(worker)
        return len(fixed)

    @contextlib.asynccontextmanager
    async def on_duty(self) -> AsyncIterator[Worker]:
        worker = await self.hire()  # clean: dismissed in finally
        try:
            yield worker
        finally:
            self.dismiss(worker)


class Quota:
    """GPU seconds per tenant; a simple counter."""

    def __init__(self, limits: dict[str, int]):
        self.limits = limits
        self.in_use: dict[str, int] = {}

    def spend(self, tenant: str, gpus: int) -> bool:
        used = self.in_use.get(tenant, 0)
        if used + gpus > self.limits.get(tenant, 0):
            return False
        self.in_use[tenant] = used + gpus
        return True

    def unspend(self, tenant: str, gpus: int) -> None:
        self.in_use[tenant] -= gpus


@dataclass
class EvalJob:
    tenant: str
    ckpt: str
    tasks: list[str]
    gpus: int = 1
    worker: Optional[Worker] = None
    results: dict[str, dict[str, float]] = field(default_factory=dict)


class EvalService:
    def __init__(self, fleet: Fleet, quota: Quota, parallel: int = 8):
        self.fleet = fleet
        self.quota = quota
        self.gate = asyncio.Semaphore(parallel)
        self.jobs: dict[int, EvalJob] = {}
        self.ids = itertools.count()
        self.background: set[asyncio.Task] = set()

    async def start(self, job: EvalJob) -> int:
        if not self.quota.spend(job.tenant, job.gpus):  # clean: near miss, given back when load fails, else by finish()
            raise PermissionError(job.tenant)
        job.worker = await self.fleet.hire_healthy()  # clean: moved into the job in self.jobs, finish() dismisses
        if not await job.worker.load(job.ckpt):
            self.fleet.dismiss(job.worker)
            self.quota.unspend(job.tenant, job.gpus)
            raise RuntimeError(f"cannot load {job.ckpt}")
        ident = next(self.ids)
        self.jobs[ident] = job
        return ident

    async def finish(self, ident: int) -> dict[str, dict[str, float]]:
        job = self.jobs.pop(ident)
        try:
            for task in job.tasks:
                score = await job.worker.score(task)
                if score is not None:
                    job.results[task] = score
        finally:
            self.fleet.dismiss(job.worker)
            self.quota.unspend(job.tenant, job.gpus)
        return job.results

    async def run_one(self, job: EvalJob, task: str) -> Optional[dict[str, float]]:
        await self.gate.acquire()  # clean: released in finally
        try:
            async with self.fleet.on_duty() as worker:  # clean: dismissed at the end of the with statement
                if not await worker.load(job.ckpt):
                    return None
                return await worker.score(task)
        finally:
            self.gate.release()

    async def run_big(self, job: EvalJob, task: str) -> Optional[dict[str, float]]:
        if not self.quota.spend(job.tenant, job.gpus):  # leak: not given back when no worker is large enough
            return None
        worker = await self.fleet.hire_with(job.gpus)  # clean: dismissed in finally, None-checked
        if worker is None:
            log.info("no worker with %d GPUs", job.gpus)
            return None
        try:
            await worker.load(job.ckpt)
            return await worker.score(task)
        finally:
            self.fleet.dismiss(worker)
            self.quota.unspend(job.tenant, job.gpus)

    async def run_retry(self, job: EvalJob, task: str, tries: int = 3) -> Optional[dict[str, float]]:
        for attempt in range(tries):
            worker = await self.fleet.hire()  # leak: a failed load goes to the next try without dismiss()
            if not await worker.load(job.ckpt):
                log.warning("%s failed to load, attempt %d", worker.name, attempt)
                continue
            score = await worker.score(task)
            self.fleet.dismiss(worker)
            if score is not None:
                return score
        return None

    def spawn(self, job: EvalJob, task: str, done: Callable[[Any], None]) -> asyncio.Task:
        async def body() -> None:
            done(await self.run_one(job, task))

        t = asyncio.create_task(body())
        self.background.add(t)
        t.add_done_callback(self.background.discard)
        return t

    async def spawn_gated(self, make: Callable[[], Awaitable[Any]]) -> asyncio.Task:
        await self.gate.acquire()  # clean: near miss, the done callback of the task releases it
        t = asyncio.ensure_future(make())
        t.add_done_callback(lambda _: self.gate.release())
        self.background.add(t)
        return t

    async def spawn_counted(self, make: Callable[[], Awaitable[Any]]) -> asyncio.Task:
        await self.gate.acquire()  # leak: the task's callback only forgets the task, no release
        t = asyncio.ensure_future(make())
        t.add_done_callback(self.background.discard)
        self.background.add(t)
        return t

    async def compare(self, a: str, b: str, task: str) -> Optional[float]:
        left = await self.fleet.hire()  # clean: near miss, dismissed on the failed load and at the end
        if not await left.load(a):
            self.fleet.dismiss(left)
            return None
        right = await self.fleet.hire()  # leak: only left is dismissed when right cannot load
        if not await right.load(b):
            self.fleet.dismiss(left)
            return None
        x = await left.score(task)
        y = await right.score(task)
        self.fleet.dismiss(left)
        self.fleet.dismiss(right)
        if x is None or y is None:
            return None
        return x["acc"] - y["acc"]
