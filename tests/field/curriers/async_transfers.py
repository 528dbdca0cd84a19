"""Asynchronous host transfers: slots are moved into tasks, futures and callbacks."""
from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Awaitable, Callable, Dict, List, Optional


class TransferFailed(Exception):
    pass


class SlotRing:
    def __init__(self, n: int) -> None:
        self._slots = list(range(n))

    def claim(self) -> int:
        return self._slots.pop()

    def claim_nowait(self) -> Optional[int]:
        return self._slots.pop() if self._slots else None

    def unclaim(self, slot: int) -> None:
        self._slots.append(slot)

    def __len__(self) -> int:
        return len(self._slots)


@dataclass
class Job:
    rid: str
    slot: Optional[int] = None
    cancelled: bool = False


class TransferEngine:
    def __init__(self, ring: SlotRing, copy: Callable[[int], Awaitable[int]]) -> None:
        self.ring = ring
        self.copy = copy
        self.queue: List[Job] = []
        self.tasks: Dict[str, asyncio.Task] = {}
        self.by_rid: Dict[str, int] = {}

    async def _run(self, slot: int) -> int:
        try:
            return await self.copy(slot)
        finally:
            self.ring.unclaim(slot)

    async def _run_checked(self, slot: int) -> Optional[int]:
        try:
            out = await self.copy(slot)
        except TransferFailed:
            return None
        self.ring.unclaim(slot)
        return out

    def start(self, rid: str) -> bool:
        slot = self.ring.claim_nowait()  # clean: near miss, moved into a task whose finally unclaims it
        if slot is None:
            return False
        self.tasks[rid] = asyncio.create_task(self._run(slot))
        return True

    def start_checked(self, rid: str) -> bool:
        slot = self.ring.claim_nowait()  # leak: the task survives a TransferFailed without unclaim
        if slot is None:
            return False
        self.tasks[rid] = asyncio.create_task(self._run_checked(slot))
        return True

    def start_callback(self, rid: str) -> asyncio.Task:
        slot = self.ring.claim()  # clean: near miss, the done callback unclaims it
        task = asyncio.ensure_future(self.copy(slot))
        task.add_done_callback(lambda _t, s=slot: self.ring.unclaim(s))
        self.tasks[rid] = task
        return task

    def start_notify(self, rid: str, done: List[str]) -> asyncio.Task:
        slot = self.ring.claim()  # leak: the done callback only notes the request
        task = asyncio.ensure_future(self.copy(slot))
        task.add_done_callback(lambda _t: done.append(rid))
        self.tasks[rid] = task
        return task

    def submit(self, job: Job) -> bool:
        job.slot = self.ring.claim_nowait()  # leak: drain drops a cancelled job together with its slot
        if job.slot is None:
            return False
        self.queue.append(job)
        return True

    async def drain(self) -> int:
        n = 0
        while self.queue:
            job = self.queue.pop(0)
            if job.cancelled:
                continue
            await self.copy(job.slot)
            self.ring.unclaim(job.slot)
            job.slot = None
            n += 1
        return n

    def hold(self, rid: str) -> bool:
        if rid in self.by_rid:
            return True
        slot = self.ring.claim_nowait()  # clean: in the table once per request, unclaimed in let_go
        if slot is None:
            return False
        self.by_rid[rid] = slot
        return True

    def let_go(self, rid: str) -> None:
        slot = self.by_rid.pop(rid, None)
        if slot is not None:
            self.ring.unclaim(slot)

    async def copy_many(self, n: int) -> List[int]:
        slots = [self.ring.claim() for _ in range(n)]  # clean: each is unclaimed by its run
        return await asyncio.gather(*(self._run(s) for s in slots))

    async def copy_until(self, n: int, limit: int) -> int:
        total = 0
        for _ in range(n):
            slot = self.ring.claim()  # leak: the break at the limit skips unclaim
            total += await self.copy(slot)
            if total >= limit:
                break
            self.ring.unclaim(slot)
        return total

    async def copy_timeout(self, seconds: float) -> Optional[int]:
        slot = self.ring.claim()  # leak: a timeout is survived without unclaim
        try:
            out = await asyncio.wait_for(self.copy(slot), seconds)
        except asyncio.TimeoutError:
            return None
        self.ring.unclaim(slot)
        return out

    async def copy_retry(self, attempts: int) -> Optional[int]:
        for _ in range(attempts):
            slot = self.ring.claim()  # clean: near miss, the finally runs before the next attempt
            try:
                return await self.copy(slot)
            except TransferFailed:
                continue
            finally:
                self.ring.unclaim(slot)
        return None


async def _main() -> None:
    async def copy(slot: int) -> int:
        await asyncio.sleep(0)
        return slot

    eng = TransferEngine(SlotRing(6), copy)
    eng.start("a")
    eng.start_callback("b")
    await asyncio.gather(*eng.tasks.values())
    eng.hold("c")
    eng.let_go("c")
    print(await eng.copy_many(3), await eng.copy_retry(2), len(eng.ring))


if __name__ == "__main__":
    asyncio.run(_main())
