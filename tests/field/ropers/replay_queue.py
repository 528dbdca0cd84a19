"""Trajectory slots shared by rollout actors and the learner."""
from __future__ import annotations

import asyncio
from typing import Any, List, Optional


class TrajSlot:
    def __init__(self, i: int) -> None:
        self.i = i
        self.steps: List[int] = []


class TrajStore:
    def __init__(self, n: int) -> None:
        self._empty = [TrajSlot(i) for i in range(n)]

    def rent(self) -> Optional[TrajSlot]:
        return self._empty.pop() if self._empty else None

    def return_slot(self, slot: TrajSlot) -> None:
        slot.steps = []
        self._empty.append(slot)

    def room(self) -> int:
        return len(self._empty)


class Actor:
    def __init__(self, store: TrajStore, out: "asyncio.Queue[TrajSlot]") -> None:
        self.store = store
        self.out = out
        self.gate = asyncio.Semaphore(2)

    async def rollout(self, length: int) -> bool:
        slot = self.store.rent()  # clean: queued, the learner returns it
        if slot is None:
            return False
        slot.steps = list(range(length))
        await self.out.put(slot)
        return True

    async def rollout_filtered(self, length: int, min_len: int) -> bool:
        slot = self.store.rent()  # leak: trajectories that are too short are not queued and not returned
        if slot is None:
            return False
        slot.steps = list(range(length))
        if len(slot.steps) >= min_len:
            await self.out.put(slot)
            return True
        return False

    async def _fill(self, slot: TrajSlot, length: int) -> None:
        try:
            for step in range(length):
                await asyncio.sleep(0)
                slot.steps.append(step)
        finally:
            self.store.return_slot(slot)

    async def run_job(self, jid: int, length: int) -> None:
        slot = self.store.rent()  # clean: near miss, the awaited _fill returns it in finally
        if slot is None:
            return
        await self._fill(slot, length)

    async def gated(self, length: int) -> int:
        await self.gate.acquire()  # leak: zero length returns with the permit held
        if length == 0:
            return 0
        await asyncio.sleep(0)
        self.gate.release()
        return length

    async def gated_safe(self, length: int) -> int:
        await self.gate.acquire()  # clean: near miss, early return inside try, finally releases
        try:
            if length == 0:
                return 0
            return length
        finally:
            self.gate.release()


class Learner:
    def __init__(self, store: TrajStore, src: "asyncio.Queue[TrajSlot]") -> None:
        self.store = store
        self.src = src

    def train(self) -> int:
        total = 0
        while not self.src.empty():
            slot = self.src.get_nowait()
            total += len(slot.steps)
            self.store.return_slot(slot)
        return total


async def _main() -> Any:
    store = TrajStore(3)
    q: "asyncio.Queue[TrajSlot]" = asyncio.Queue()
    actor, learner = Actor(store, q), Learner(store, q)
    await actor.rollout(4)
    await actor.run_job(1, 2)
    await actor.gated_safe(0)
    assert learner.train() == 4 and store.room() == 3


if __name__ == "__main__":
    asyncio.run(_main())
