"""Async front of the long-context decoder: decode slots, per-request tasks, streaming."""
from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import AsyncIterator, Awaitable, Callable, Dict, List, Optional


class EngineError(Exception):
    pass


@dataclass(eq=False)
class Slot:
    index: int
    rid: Optional[str] = None
    out: List[int] = field(default_factory=list)


class SlotBank:
    def __init__(self, n: int):
        self._idle: List[Slot] = [Slot(i) for i in range(n)]
        self._freed = asyncio.Event()
        self.n = n

    async def seize(self, rid: str) -> Slot:
        while not self._idle:
            self._freed.clear()
            await self._freed.wait()
        return self._seat(rid)

    def seize_nowait(self, rid: str) -> Optional[Slot]:
        return self._seat(rid) if self._idle else None

    def _seat(self, rid: str) -> Slot:
        slot = self._idle.pop()
        slot.rid = rid
        slot.out.clear()
        return slot

    def vacate(self, slot: Slot) -> None:
        slot.rid = None
        self._idle.append(slot)
        self._freed.set()

    @property
    def idle(self) -> int:
        return len(self._idle)


@dataclass
class Job:
    rid: str
    prompt: List[int]
    limit: int = 8
    slot: Optional[Slot] = None
    task: Optional["asyncio.Task[None]"] = None


Step = Callable[[Slot, List[int]], Awaitable[int]]


class Gateway:
    def __init__(self, bank: SlotBank, step: Step, stop_id: int = 0):
        self.bank = bank
        self.step = step
        self.stop_id = stop_id
        self.jobs: Dict[str, Job] = {}
        self.parked: Dict[str, Slot] = {}
        self.failures = 0
        self.admission = asyncio.Lock()

    async def complete(self, job: Job) -> List[int]:
        slot = await self.bank.seize(job.rid)  # leak: EngineError is counted and survived without vacate
        try:
            while len(slot.out) < job.limit:
                tok = await self.step(slot, job.prompt)
                if tok == self.stop_id:
                    break
                slot.out.append(tok)
        except EngineError:
            self.failures += 1
            return []
        out = list(slot.out)
        self.bank.vacate(slot)
        return out

    async def complete_safely(self, job: Job) -> List[int]:
        slot = await self.bank.seize(job.rid)  # clean: near miss, the handler returns through finally
        try:
            while len(slot.out) < job.limit:
                tok = await self.step(slot, job.prompt)
                if tok == self.stop_id:
                    return list(slot.out)
                slot.out.append(tok)
            return list(slot.out)
        except EngineError:
            self.failures += 1
            return []
        finally:
            self.bank.vacate(slot)

    async def stream(self, job: Job) -> AsyncIterator[int]:
        slot = await self.bank.seize(job.rid)  # clean: finally vacates when the stream ends or is closed
        try:
            for _ in range(job.limit):
                tok = await self.step(slot, job.prompt)
                if tok == self.stop_id:
                    return
                yield tok
        finally:
            self.bank.vacate(slot)

    async def stream_once(self, job: Job) -> AsyncIterator[int]:
        slot = await self.bank.seize(job.rid)  # leak: stop token returns before the vacate
        for _ in range(job.limit):
            tok = await self.step(slot, job.prompt)
            if tok == self.stop_id:
                return
            yield tok
        self.bank.vacate(slot)

    def spawn(self, job: Job) -> bool:
        """Runs the job in a task that gives the slot up when it is done."""
        slot = self.bank.seize_nowait(job.rid)  # clean: near miss, the task's done callback vacates it, cancelled or not
        if slot is None:
            return False
        job.slot = slot
        job.task = asyncio.ensure_future(self._drive(job))
        job.task.add_done_callback(lambda _t: self._done(job))
        self.jobs[job.rid] = job
        return True

    async def _drive(self, job: Job) -> None:
        for _ in range(job.limit):
            job.slot.out.append(await self.step(job.slot, job.prompt))

    def _done(self, job: Job) -> None:
        self.jobs.pop(job.rid, None)
        if job.slot is not None:
            self.bank.vacate(job.slot)
            job.slot = None

    def spawn_owning(self, job: Job) -> bool:
        """As spawn, the slot is given up at the end of the coroutine."""
        slot = self.bank.seize_nowait(job.rid)  # leak: abort cancels the task, which then never gets to its vacate
        if slot is None:
            return False
        job.slot = slot
        job.task = asyncio.ensure_future(self._drive_owning(job))
        self.jobs[job.rid] = job
        return True

    async def _drive_owning(self, job: Job) -> None:
        await self._drive(job)
        self.jobs.pop(job.rid, None)
        slot, job.slot = job.slot, None
        self.bank.vacate(slot)

    def abort(self, rid: str) -> bool:
        job = self.jobs.pop(rid, None)
        if job is None or job.task is None:
            return False
        job.task.cancel()
        return True

    def park(self, rid: str) -> bool:
        """Keeps a slot warm for a client that has announced itself."""
        if rid in self.parked:
            return True
        slot = self.bank.seize_nowait(rid)  # clean: near miss, kept in parked, unpark or drain vacates
        if slot is None:
            return False
        self.parked[rid] = slot
        return True

    def unpark(self, rid: str) -> None:
        slot = self.parked.pop(rid, None)
        if slot is not None:
            self.bank.vacate(slot)

    async def admit(self, job: Job, deadline: float) -> bool:
        await self.admission.acquire()  # leak: the return for a job already known keeps the lock
        if job.rid in self.jobs:
            return False
        ok = self.spawn(job)
        self.admission.release()
        return ok

    async def drain(self) -> None:
        await self.admission.acquire()  # clean: released in finally
        try:
            for job in list(self.jobs.values()):
                await asyncio.wait([job.task])
            for rid in list(self.parked):
                self.unpark(rid)
        finally:
            self.admission.release()
