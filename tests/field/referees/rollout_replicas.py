"""Rollout driver for RL post-training: leases inference replicas, versioned weights and sample tickets."""
from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from dataclasses import dataclass, field
from typing import AsyncIterator, Optional


@dataclass
class Replica:
    name: str
    version: int = 0
    healthy: bool = True

    async def generate(self, prompt: str) -> str:
        await asyncio.sleep(0)
        if not self.healthy:
            raise ConnectionError(self.name)
        return prompt[::-1]


class ReplicaPool:
    def __init__(self, replicas: list[Replica]) -> None:
        self.idle: deque[Replica] = deque(replicas)
        self.changed = asyncio.Condition()

    async def borrow(self) -> Replica:
        async with self.changed:
            await self.changed.wait_for(lambda: bool(self.idle))
            return self.idle.popleft()

    def borrow_nowait(self) -> Optional[Replica]:
        return self.idle.popleft() if self.idle else None

    async def hand_back(self, replica: Replica) -> None:
        async with self.changed:
            self.idle.append(replica)
            self.changed.notify()

    async def borrow_version(self, version: int) -> Optional[Replica]:
        for _ in range(len(self.idle)):
            replica = self.borrow_nowait()  # leak: replicas of another version are rebound by the next turn
            if replica is None:
                return None
            if replica.version == version:
                return replica
        return None

    @contextlib.asynccontextmanager
    async def borrowed(self) -> AsyncIterator[Replica]:
        replica = await self.borrow()  # clean: near miss, finally hands it back around the yield
        try:
            yield replica
        finally:
            await self.hand_back(replica)


class WeightStore:
    def __init__(self) -> None:
        self.refs: dict[int, int] = {}
        self.current = 0

    def open(self, version: Optional[int] = None) -> int:
        v = self.current if version is None else version
        self.refs[v] = self.refs.get(v, 0) + 1
        return v

    def close(self, version: int) -> None:
        self.refs[version] -= 1
        if self.refs[version] == 0 and version != self.current:
            del self.refs[version]


class SampleTickets:
    def __init__(self, n: int) -> None:
        self.free = set(range(n))

    def take(self) -> Optional[int]:
        return self.free.pop() if self.free else None

    def put(self, ticket: int) -> None:
        self.free.add(ticket)


@dataclass
class Trajectory:
    prompt: str
    ticket: int
    version: int
    text: str = ""
    reward: float = 0.0


@dataclass
class RolloutDriver:
    pool: ReplicaPool
    weights: WeightStore
    tickets: SampleTickets
    buffer: list[Trajectory] = field(default_factory=list)
    dropped: int = 0

    async def rollout(self, prompt: str) -> Optional[Trajectory]:
        ticket = self.tickets.take()  # clean: near miss, put back on failure and otherwise carried by the trajectory
        if ticket is None:
            return None
        version = self.weights.open()  # leak: a failing replica returns None with the weight version still open
        replica = await self.pool.borrow()  # clean: handed back in finally
        try:
            text = await replica.generate(prompt)
        except ConnectionError:
            self.tickets.put(ticket)
            return None
        finally:
            await self.pool.hand_back(replica)
        return Trajectory(prompt, ticket, version, text)

    def retire(self, traj: Trajectory) -> None:
        self.tickets.put(traj.ticket)
        self.weights.close(traj.version)

    async def collect(self, prompts: list[str]) -> int:
        for prompt in prompts:
            traj = await self.rollout(prompt)  # clean: near miss, empty texts are retired and the others wait in buffer for consume
            if traj is None:
                self.dropped += 1
                continue
            if not traj.text:
                self.retire(traj)
                continue
            self.buffer.append(traj)
        return len(self.buffer)

    def consume(self, n: int) -> list[str]:
        batch, self.buffer = self.buffer[:n], self.buffer[n:]
        texts = [t.text for t in batch]
        for traj in batch:
            self.retire(traj)
        return texts

    async def collect_group(self, prompt: str, n: int) -> list[str]:
        results = await asyncio.gather(*(self.rollout(prompt) for _ in range(n)))  # leak: zero-reward trajectories are filtered out before retire
        kept: list[Trajectory] = []
        for traj in results:
            if traj is None:
                continue
            traj.reward = random.random()
            if traj.reward > 0.5:
                kept.append(traj)
        texts = [t.text for t in kept]
        for traj in kept:
            self.retire(traj)
        return texts

    async def evaluate(self, prompts: list[str]) -> float:
        hits = 0
        async with self.pool.borrowed() as replica:  # clean: the context manager hands it back
            for prompt in prompts:
                try:
                    hits += bool(await replica.generate(prompt))
                except ConnectionError:
                    break
        return hits / max(1, len(prompts))

    async def sync_weights(self, version: int) -> int:
        pulled: list[Replica] = []
        while True:
            replica = self.pool.borrow_nowait()  # clean: near miss, pulled is handed back one by one after the update
            if replica is None:
                break
            pulled.append(replica)
        for replica in pulled:
            replica.version = version
            await self.pool.hand_back(replica)
        self.weights.current = version
        return len(pulled)

    async def replay(self, prompt: str, version: int) -> Optional[str]:
        replica = await self.pool.borrow_version(version)  # leak: an unhealthy replica is not handed back before the return
        if replica is None:
            return None
        if not replica.healthy:
            return None
        text = await replica.generate(prompt)
        await self.pool.hand_back(replica)
        return text

    async def compare(self, prompt: str) -> Optional[bool]:
        a = self.pool.borrow_nowait()  # clean: near miss, handed back when the second one is missing
        if a is None:
            return None
        b = self.pool.borrow_nowait()  # clean: handed back with the first
        if b is None:
            await self.pool.hand_back(a)
            return None
        same = a.version == b.version
        await self.pool.hand_back(b)
        await self.pool.hand_back(a)
        return same
