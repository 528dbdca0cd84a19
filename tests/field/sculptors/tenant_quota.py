"""Tenant quotas for GPU minutes. ask() answers with a verdict, withdraw() ends what it granted."""
from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Verdict:
    granted: bool
    ticket: str = ""
    wait_seconds: float = 0.0


@dataclass
class _Tenant:
    cap: int
    used: int = 0
    tickets: dict[str, int] = field(default_factory=dict)


class QuotaService:
    def __init__(self, caps: dict[str, int]) -> None:
        self._tenants = {name: _Tenant(cap) for name, cap in caps.items()}
        self._where: dict[str, str] = {}
        self._lock = asyncio.Lock()

    async def ask(self, name: str, units: int) -> Verdict:
        async with self._lock:
            tenant = self._tenants[name]
            if tenant.used + units > tenant.cap:
                return Verdict(False, wait_seconds=5.0)
            ticket = uuid.uuid4().hex
            tenant.used += units
            tenant.tickets[ticket] = units
            self._where[ticket] = name
            return Verdict(True, ticket)

    async def withdraw(self, ticket: str) -> None:
        async with self._lock:
            tenant = self._tenants[self._where.pop(ticket)]
            tenant.used -= tenant.tickets.pop(ticket)


@dataclass
class Training:
    id: str
    tenant: str
    gpus: int
    dataset: str


class Scheduler:
    def __init__(self, quotas: QuotaService, cluster) -> None:
        self.quotas = quotas
        self.cluster = cluster
        self.tickets: dict[str, str] = {}

    async def ask_patiently(self, tenant: str, units: int, tries: int) -> Verdict:
        verdict = Verdict(False)
        for _ in range(tries):
            verdict = await self.quotas.ask(tenant, units)  # clean: near miss, a granted one ends the loop
            if verdict.granted:
                break
            await asyncio.sleep(verdict.wait_seconds)
        return verdict

    async def run(self, job: Training) -> int:
        verdict = await self.quotas.ask(job.tenant, job.gpus)  # clean: withdrawn in finally
        if not verdict.granted:
            return 75
        try:
            return await self.cluster.run(job.id, job.gpus)
        finally:
            await self.quotas.withdraw(verdict.ticket)

    async def run_patiently(self, job: Training) -> int:
        verdict = await self.ask_patiently(job.tenant, job.gpus, 10)  # leak: no data set returns with it
        if not verdict.granted:
            return 75
        if not await self.cluster.has_dataset(job.dataset):
            return 66
        code = await self.cluster.run(job.id, job.gpus)
        await self.quotas.withdraw(verdict.ticket)
        return code

    async def run_checked(self, job: Training) -> int:
        verdict = await self.ask_patiently(job.tenant, job.gpus, 3)  # clean: near miss, both ways withdraw
        if not verdict.granted:
            return 75
        code = 66
        if await self.cluster.has_dataset(job.dataset):
            code = await self.cluster.run(job.id, job.gpus)
        await self.quotas.withdraw(verdict.ticket)
        return code

    async def launch(self, job: Training) -> bool:
        if job.id in self.tickets:
            return False
        verdict = await self.quotas.ask(job.tenant, job.gpus)  # clean: near miss, kept, ended in collect
        if verdict.granted:
            self.tickets[job.id] = verdict.ticket
            await self.cluster.launch(job.id, job.gpus)
        return verdict.granted

    async def collect(self, job_id: str) -> None:
        ticket = self.tickets.pop(job_id, None)
        if ticket is not None:
            await self.quotas.withdraw(ticket)

    async def launch_sweep(self, jobs: list[Training]) -> int:
        verdicts: list[Verdict] = []
        for job in jobs:
            verdicts.append(await self.quotas.ask(job.tenant, job.gpus))  # leak: one refusal drops all
        if not all(v.granted for v in verdicts):
            return 0
        for job in jobs:
            await self.cluster.run(job.id, job.gpus)
        for verdict in verdicts:
            await self.quotas.withdraw(verdict.ticket)
        return len(jobs)

    async def launch_grid(self, jobs: list[Training]) -> int:
        verdicts = [await self.quotas.ask(j.tenant, j.gpus) for j in jobs]  # clean: near miss, all end
        started = 0
        if all(v.granted for v in verdicts):
            for job in jobs:
                await self.cluster.run(job.id, job.gpus)
                started += 1
        for verdict in verdicts:
            if verdict.granted:
                await self.quotas.withdraw(verdict.ticket)
        return started

    async def headroom(self, tenant: str, steps: list[int]) -> int:
        for units in sorted(steps, reverse=True):
            if (await self.quotas.ask(tenant, units)).granted:  # leak: the verdict is dropped
                return units
        return 0

    async def fits(self, tenant: str, units: int) -> bool:
        match await self.quotas.ask(tenant, units):  # clean: near miss, the granted case withdraws
            case Verdict(granted=True, ticket=ticket):
                await self.quotas.withdraw(ticket)
                return True
            case _:
                return False
