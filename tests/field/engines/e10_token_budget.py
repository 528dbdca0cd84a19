"""Admission control by token counts, one budget per tenant and one global."""
from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import AsyncIterator

logger = logging.getLogger(__name__)


class Phase(Enum):
    QUEUED = "queued"
    ADMITTED = "admitted"
    DONE = "done"


@dataclass
class Job:
    job_id: str
    tenant: str
    prompt_tokens: int
    max_new_tokens: int
    phase: Phase = Phase.QUEUED
    charged: int = 0

    @property
    def cost(self) -> int:
        return self.prompt_tokens + self.max_new_tokens


class TokenBudget:
    """A counter with a ceiling."""

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self.in_use = 0

    def reserve(self, n: int) -> bool:
        if self.in_use + n > self.limit:
            return False
        self.in_use += n  # clean: the caller is told by True
        return True

    def unreserve(self, n: int) -> None:
        self.in_use = max(0, self.in_use - n)


class Admission:
    """Charges each job to its tenant and to the whole engine."""

    def __init__(self, total: TokenBudget, tenants: dict[str, TokenBudget]) -> None:
        self.total = total
        self.tenants = tenants
        self.queue: deque[Job] = deque()
        self.active: dict[str, Job] = {}

    def try_admit(self, job: Job) -> bool:
        if job.job_id in self.active:
            return False
        tenant = self.tenants[job.tenant]
        if not tenant.reserve(job.cost):  # clean: near miss, rolled back when the global budget refuses
            return False
        if not self.total.reserve(job.cost):  # clean: job.charged holds it until retire
            tenant.unreserve(job.cost)
            return False
        job.charged = job.cost
        job.phase = Phase.ADMITTED
        self.active[job.job_id] = job
        return True

    def admit_prefill_only(self, job: Job) -> bool:
        """Charge only the prompt; decode is charged by another engine."""
        if job.job_id in self.active:
            return False
        ok = self.tenants[job.tenant].reserve(job.prompt_tokens)  # leak: stays charged when the global budget refuses
        if not ok:
            return False
        if not self.total.reserve(job.prompt_tokens):  # clean: refused or recorded on the job
            job.phase = Phase.QUEUED
            return False
        job.charged = job.prompt_tokens
        job.phase = Phase.ADMITTED
        self.active[job.job_id] = job
        return True

    def retire(self, job_id: str) -> None:
        job = self.active.pop(job_id, None)
        if job is None:
            return
        self.tenants[job.tenant].unreserve(job.charged)
        self.total.unreserve(job.charged)
        job.charged = 0
        job.phase = Phase.DONE

    def pump(self) -> int:
        """Admit from the head of the queue; jobs that do not fit go to the back."""
        admitted = 0
        for _ in range(len(self.queue)):
            job = self.queue.popleft()
            if self.try_admit(job):
                admitted += 1
            else:
                self.queue.append(job)
        return admitted


class Batcher:
    """Packs chunks of prompts into a step under a step-wide budget."""

    def __init__(self, step_budget: TokenBudget, chunk: int) -> None:
        self.step_budget = step_budget
        self.chunk = chunk

    def pack(self, jobs: list[Job]) -> list[tuple[Job, int]]:
        plan: list[tuple[Job, int]] = []
        for job in jobs:
            n = min(self.chunk, job.prompt_tokens)
            if not self.step_budget.reserve(n):  # leak: done jobs are skipped after they were charged
                break
            if job.phase is Phase.DONE:
                continue
            plan.append((job, n))
        return plan

    def pack_decode(self, jobs: list[Job]) -> list[tuple[Job, int]]:
        plan: list[tuple[Job, int]] = []
        for job in jobs:
            if job.phase is Phase.DONE:
                continue
            if not self.step_budget.reserve(1):  # clean: near miss, each plan row is unreserved by step_done
                break
            plan.append((job, 1))
        return plan

    def step_done(self, plan: list[tuple[Job, int]]) -> None:
        for _job, n in plan:
            self.step_budget.unreserve(n)

    def speculative(self, want: int, verify_ok: bool) -> int:
        """Try to charge ``want`` tokens, then half, and settle what was used."""
        n = want
        while n and not self.step_budget.reserve(n):  # clean: near miss, a refusal charges nothing, the success is settled below
            n //= 2
        used = n if verify_ok else 0
        self.step_budget.unreserve(n)
        return used


async def stream_tokens(budget: TokenBudget, source: AsyncIterator[int], limit: int) -> AsyncIterator[int]:
    """Pass tokens on, charging a window of 32 of them at a time."""
    window = 32
    seen = 0
    while seen < limit:
        if not budget.reserve(window):  # leak: the return on the end marker leaves the window charged
            await asyncio.sleep(0.01)
            continue
        for _ in range(window):
            token = await source.__anext__()
            if token < 0:
                return
            seen += 1
            yield token
        budget.unreserve(window)


async def run_job(budget: TokenBudget, job: Job, source: AsyncIterator[int]) -> list[int]:
    """Collect the output of one job under its own charge."""
    while not budget.reserve(job.cost):  # clean: near miss, left only once charged, then always unreserved
        await asyncio.sleep(0.01)
    out: list[int] = []
    try:
        async for token in source:
            out.append(token)
            if len(out) >= job.max_new_tokens:
                break
    finally:
        budget.unreserve(job.cost)
    return out
