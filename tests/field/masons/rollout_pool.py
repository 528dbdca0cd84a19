"""Rollout workers and trajectory tickets for the RL trainer."""
from __future__ import annotations

import asyncio
import random
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import AsyncIterator, Deque, Dict, List, Optional


@dataclass
class Worker:
    rank: int
    version: int = 0
    healthy: bool = True

    async def generate(self, prompt: str, n: int) -> List[str]:
        await asyncio.sleep(0)
        return [f"{prompt}:{self.rank}:{i}" for i in range(n)]


class WorkerPool:
    def __init__(self, size: int) -> None:
        self._idle: Deque[Worker] = deque(Worker(i) for i in range(size))
        self._wake = asyncio.Event()

    def grab(self) -> Optional[Worker]:
        return self._idle.popleft() if self._idle else None

    def grab_version(self, version: int) -> Optional[Worker]:
        for _ in range(len(self._idle)):
            worker = self._idle.popleft()  # clean: near miss, one of another version goes back to the end of the line
            if worker.version == version:
                return worker
            self._idle.append(worker)
        return None

    def grab_healthy(self) -> Optional[Worker]:
        while self._idle:
            worker = self._idle.popleft()  # leak: an unhealthy worker is skipped and falls out of the pool for good
            if worker.healthy:
                return worker
        return None

    async def grab_wait(self) -> Worker:
        while not self._idle:
            self._wake.clear()
            await self._wake.wait()
        return self._idle.popleft()

    def hand_back(self, worker: Worker) -> None:
        self._idle.append(worker)
        self._wake.set()


class TicketOffice:
    """Bounds how many trajectories may be off-policy at a time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.issued = 0

    def issue(self, n: int = 1) -> bool:
        if self.issued + n > self.limit:
            return False
        self.issued += n
        return True

    def redeem(self, n: int = 1) -> None:
        self.issued -= n


@dataclass
class Group:
    prompt: str
    answers: List[str] = field(default_factory=list)
    tickets: int = 0


class RolloutManager:
    def __init__(self, pool: WorkerPool, tickets: TicketOffice, n: int) -> None:
        self.pool = pool
        self.tickets = tickets
        self.n = n
        self.buffer: Deque[Group] = deque()
        self.sticky: Dict[str, Worker] = {}
        self.running: Dict[str, "asyncio.Task[None]"] = {}

    async def rollout(self, prompt: str) -> Optional[Group]:
        if not self.tickets.issue(self.n):  # clean: near miss, redeemed when no worker is idle, else they travel in the group
            return None
        worker = self.pool.grab()  # clean: handed back by the finally
        if worker is None:
            self.tickets.redeem(self.n)
            return None
        try:
            answers = await worker.generate(prompt, self.n)
        finally:
            self.pool.hand_back(worker)
        group = Group(prompt, answers, self.n)
        self.buffer.append(group)
        return group

    async def rollout_filtered(self, prompt: str) -> bool:
        worker = await self.pool.grab_wait()  # clean: handed back right after generation, in the finally
        try:
            answers = await worker.generate(prompt, self.n)
        finally:
            self.pool.hand_back(worker)
        if not self.tickets.issue(self.n):  # leak: the group records one ticket less for each duplicate answer
            return False
        unique = list(dict.fromkeys(answers))
        self.buffer.append(Group(prompt, unique, len(unique)))
        return True

    def consume(self, batch: int) -> List[Group]:
        out: List[Group] = []
        while self.buffer and len(out) < batch:
            group = self.buffer.popleft()
            self.tickets.redeem(group.tickets)
            out.append(group)
        return out

    def drop_stale(self) -> int:
        dropped = 0
        while self.buffer:
            group = self.buffer.popleft()
            self.tickets.redeem(group.tickets)
            dropped += 1
        return dropped

    async def probe(self, version: int) -> bool:
        worker = self.pool.grab_version(version)  # leak: the timeout handler returns False and keeps the worker
        if worker is None:
            return False
        try:
            await asyncio.wait_for(worker.generate("ping", 1), 1.0)
        except asyncio.TimeoutError:
            return False
        self.pool.hand_back(worker)
        return True

    async def sync_weights(self, version: int) -> int:
        updated: List[Worker] = []
        while True:
            worker = self.pool.grab()  # clean: near miss, collected in updated and handed back below
            if worker is None:
                break
            worker.version = version
            updated.append(worker)
        for worker in updated:
            self.pool.hand_back(worker)
        return len(updated)

    def bind(self, session: str) -> bool:
        if session in self.sticky:
            return True
        worker = self.pool.grab_healthy()  # clean: near miss, only when none is bound, unbind hands it back
        if worker is None:
            return False
        self.sticky[session] = worker
        return True

    def rebind(self, session: str) -> bool:
        worker = self.pool.grab_healthy()  # leak: the session's former worker is overwritten and not handed back
        if worker is None:
            return False
        self.sticky[session] = worker
        return True

    def unbind(self, session: str) -> None:
        worker = self.sticky.pop(session, None)
        if worker is not None:
            self.pool.hand_back(worker)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Worker]:
        worker = await self.pool.grab_wait()  # clean: near miss, finally hands it back also on cancellation
        try:
            yield worker
        finally:
            self.pool.hand_back(worker)

    async def evaluate(self, prompts: List[str]) -> List[str]:
        out: List[str] = []
        for prompt in prompts:
            async with self.lease() as worker:  # clean: lease hands the worker back at the end of the block
                out.extend(await worker.generate(prompt, 1))
        return out

    async def _serve(self, prompt: str, worker: Worker) -> None:
        try:
            answers = await worker.generate(prompt, self.n)
            self.buffer.append(Group(prompt, answers, 0))
        except asyncio.CancelledError:
            return
        self.pool.hand_back(worker)

    async def launch(self, prompt: str) -> bool:
        worker = self.pool.grab()  # leak: a cancelled _serve returns without handing it back
        if worker is None:
            return False
        self.running[prompt] = asyncio.create_task(self._serve(prompt, worker))
        return True

    async def preempt(self, k: int) -> None:
        for prompt in random.sample(sorted(self.running), min(k, len(self.running))):
            task = self.running.pop(prompt)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
