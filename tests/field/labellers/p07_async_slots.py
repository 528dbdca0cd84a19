"""Decode slots of an asynchronous engine, lent to tasks and callbacks."""
from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Awaitable, Callable, Dict, List, Optional, Set


class SlotPool:
    def __init__(self, count: int) -> None:
        self._free: Set[int] = set(range(count))
        self._busy: Set[int] = set()

    async def acquire(self) -> int:
        while not self._free:
            await asyncio.sleep(0.001)
        slot = self._free.pop()  # clean: pool body, marked busy and returned
        self._busy.add(slot)
        return slot

    def acquire_nowait(self) -> Optional[int]:
        if not self._free:
            return None
        slot = self._free.pop()  # clean: pool body, marked busy and returned
        self._busy.add(slot)
        return slot

    def release(self, slot: int) -> None:
        if slot in self._busy:
            self._busy.discard(slot)
            self._free.add(slot)


@dataclass
class Job:
    jid: str
    prompt: str
    slot: Optional[int] = None
    aborted: bool = False


Runner = Callable[[int, str], Awaitable[str]]


class Engine:
    def __init__(self, slots: SlotPool, run: Runner) -> None:
        self.slots = slots
        self.run = run
        self.tasks: Dict[str, asyncio.Task] = {}
        self.parked: Dict[str, int] = {}
        self.queue: "asyncio.Queue[Job]" = asyncio.Queue()

    async def generate(self, job: Job) -> Optional[str]:
        slot = await self.slots.acquire()  # leak: an aborted job returns before the try block is entered
        if job.aborted:
            return None
        try:
            return await self.run(slot, job.prompt)
        finally:
            self.slots.release(slot)

    async def generate_timed(self, job: Job, seconds: float) -> Optional[str]:
        slot = await self.slots.acquire()  # clean: near miss, the handler returns but finally releases
        try:
            return await asyncio.wait_for(self.run(slot, job.prompt), seconds)
        except asyncio.TimeoutError:
            job.aborted = True
            return None
        finally:
            self.slots.release(slot)

    async def _run_held(self, job: Job) -> str:
        try:
            return await self.run(job.slot, job.prompt)
        finally:
            self.slots.release(job.slot)
            job.slot = None

    async def _run_plain(self, job: Job) -> str:
        text = await self.run(job.slot, job.prompt)
        job.slot = None
        return text

    async def spawn(self, job: Job) -> None:
        job.slot = await self.slots.acquire()  # clean: near miss, the task takes the job's slot over and releases it
        self.tasks[job.jid] = asyncio.create_task(self._run_held(job))

    async def spawn_batch(self, jobs: List[Job]) -> int:
        started = 0
        for job in jobs:
            job.slot = await self.slots.acquire()  # leak: _run_plain clears the field and nobody releases the slot
            self.tasks[job.jid] = asyncio.create_task(self._run_plain(job))
            started += 1
        return started

    def spawn_with_callback(self, prompt: str, jid: str) -> bool:
        slot = self.slots.acquire_nowait()  # clean: near miss, done callback releases the slot bound as its default
        if slot is None:
            return False
        task = asyncio.ensure_future(self.run(slot, prompt))
        task.add_done_callback(lambda _t, s=slot: self.slots.release(s))
        self.tasks[jid] = task
        return True

    def spawn_logged(self, prompt: str, jid: str, log: List[str]) -> bool:
        slot = self.slots.acquire_nowait()  # leak: the done callback only logs
        if slot is None:
            return False
        task = asyncio.ensure_future(self.run(slot, prompt))
        task.add_done_callback(lambda _t: log.append(f"{jid} left slot {slot}"))
        self.tasks[jid] = task
        return True

    def park(self, job: Job) -> bool:
        if job.jid in self.parked:
            return True
        slot = self.slots.acquire_nowait()  # clean: held in parked, released by unpark or unpark_all
        if slot is None:
            return False
        self.parked[job.jid] = slot
        return True

    def unpark(self, jid: str) -> None:
        slot = self.parked.pop(jid, None)
        if slot is not None:
            self.slots.release(slot)

    def unpark_all(self) -> None:
        for jid in list(self.parked):
            self.unpark(jid)

    async def submit(self, job: Job) -> None:
        job.slot = await self.slots.acquire()  # clean: queued with the job, worker releases it after the run
        await self.queue.put(job)

    async def worker(self) -> None:
        while True:
            job = await self.queue.get()
            if job.slot is None:
                continue
            await self._run_held(job)


async def race(slots: SlotPool, run: Runner, prompt: str) -> Optional[str]:
    first = slots.acquire_nowait()  # clean: released on the lone path, and after the race
    if first is None:
        return None
    second = slots.acquire_nowait()  # leak: after the race first alone is released
    if second is None:
        text = await run(first, prompt)
        slots.release(first)
        return text
    a, b = asyncio.ensure_future(run(first, prompt)), asyncio.ensure_future(run(second, prompt))
    done, rest = await asyncio.wait({a, b}, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    slots.release(first)
    return next(iter(done)).result()
