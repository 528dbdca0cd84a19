"""Admission control in front of the inference workers."""
from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Awaitable, Callable, Dict, List, Optional

from admitlib import PermitGate


@dataclass
class Job:
    tenant: str
    payload: bytes
    weight: int = 1
    cancelled: bool = False


class Admission:
    def __init__(self, total: int, per_tenant: int, run: Callable[[bytes], Awaitable[Any]]) -> None:
        self._global = PermitGate(total)
        self._per_tenant = per_tenant
        self._tenants: Dict[str, PermitGate] = {}
        self._run = run

    def _tenant_gate(self, tenant: str) -> PermitGate:
        gate = self._tenants.get(tenant)
        if gate is None:
            gate = self._tenants[tenant] = PermitGate(self._per_tenant)
        return gate

    async def run_now(self, job: Job) -> Optional[Any]:
        await self._global.take_permit()  # leak: a cancelled job returns with the permit
        if job.cancelled:
            return None
        try:
            return await self._run(job.payload)
        finally:
            self._global.give_permit()

    async def submit(self, job: Job) -> asyncio.Task:
        await self._global.take_permit()  # clean: near miss, the task gives the permit back in its finally
        return asyncio.create_task(self._serve(job))

    async def _serve(self, job: Job) -> Any:
        try:
            return await self._run(job.payload)
        finally:
            self._global.give_permit()

    async def submit_detached(self, job: Job) -> asyncio.Task:
        await self._global.take_permit()  # clean: near miss, the done callback gives it back
        task = asyncio.ensure_future(self._run(job.payload))
        task.add_done_callback(lambda _: self._global.give_permit())
        return task

    async def admit(self, job: Job) -> bool:
        """Take both permits for a job; retire() returns them."""
        gate = self._tenant_gate(job.tenant)
        await self._global.take_permit()  # clean: near miss, given back when the tenant gate refuses, else by retire
        if not gate.try_permit():  # clean: on success given back by retire
            self._global.give_permit()
            return False
        return True

    def retire(self, job: Job) -> None:
        self._tenant_gate(job.tenant).give_permit()
        self._global.give_permit()

    async def run_fair(self, job: Job) -> Optional[Any]:
        if not await self.admit(job):  # clean: retired in the finally when it was admitted
            return None
        try:
            return await self._run(job.payload)
        finally:
            self.retire(job)

    async def run_batch(self, jobs: List[Job]) -> List[Any]:
        results = []
        for job in jobs:
            if not await self.admit(job):  # leak: cancelled jobs are skipped after they were admitted
                break
            if job.cancelled:
                continue
            results.append(await self._run(job.payload))
            self.retire(job)
        return results

    async def run_urgent(self, job: Job) -> Optional[Any]:
        gate = self._tenant_gate(job.tenant)
        await self._global.take_permit()  # leak: kept when the tenant gate refuses
        if not gate.try_permit():  # clean: near miss, the refusing arm holds nothing of this gate
            return None
        try:
            return await self._run(job.payload)
        finally:
            gate.give_permit()
            self._global.give_permit()

    async def run_weighted(self, job: Job) -> Any:
        for _ in range(job.weight):
            await self._global.take_permit()  # clean: near miss, the same number is given back
        try:
            return await self._run(job.payload)
        finally:
            for _ in range(job.weight):
                self._global.give_permit()

    async def run_or_timeout(self, job: Job, seconds: float) -> Optional[Any]:
        try:
            await asyncio.wait_for(self._global.take_permit(), seconds)  # clean: the timeout holds nothing, otherwise given back in the finally
        except asyncio.TimeoutError:
            return None
        try:
            return await self._run(job.payload)
        finally:
            self._global.give_permit()


async def consume(gate: PermitGate, queue: "asyncio.Queue[Optional[Job]]", run: Callable[[bytes], Awaitable[Any]]) -> int:
    served = 0
    while True:
        await gate.take_permit()  # leak: the sentinel breaks out of the loop with the permit
        job = await queue.get()
        if job is None:
            break
        await run(job.payload)
        gate.give_permit()
        served += 1
    return served


async def consume_some(gate: PermitGate, queue: "asyncio.Queue[Job]", run: Callable[[bytes], Awaitable[Any]]) -> int:
    failed = 0
    while not queue.empty():
        job = queue.get_nowait()
        await gate.take_permit()  # leak: the handler counts the failure and goes on without giving the permit back
        try:
            await run(job.payload)
        except ValueError:
            failed += 1
            continue
        gate.give_permit()
    return failed


class Turn:
    """`async with Turn(gate, optional=True)`: proceeds without a permit when optional."""

    def __init__(self, gate: PermitGate, optional: bool) -> None:
        self._gate = gate
        self._optional = optional
        self._held = False

    async def __aenter__(self) -> bool:
        if self._optional:
            self._held = self._gate.try_permit()  # clean: near miss, the held flag decides in __aexit__
        else:
            await self._gate.take_permit()  # clean: the held flag is set, __aexit__ gives it back
            self._held = True
        return self._held

    async def __aexit__(self, *exc_info: Any) -> None:
        if self._held:
            self._held = False
            self._gate.give_permit()
