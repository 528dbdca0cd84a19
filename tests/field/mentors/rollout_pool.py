"""Rollout workers for RL: engine replicas are checked out, weights versions are held."""
from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, field
from typing import Any, Awaitable, Callable

logger = logging.getLogger(__name__)

ToolFn = Callable[[str], Awaitable[str]]


class EngineDead(Exception):
    pass


@dataclass(eq=False)
class Replica:
    index: int
    version: int = 0
    alive: bool = True

    async def generate(self, prompt: str, **sampling: Any) -> str:
        if not self.alive:
            raise EngineDead(self.index)
        await asyncio.sleep(0)
        return prompt + " ..."


class ReplicaPool:
    def __init__(self, replicas: list[Replica]) -> None:
        self._q: asyncio.Queue[Replica] = asyncio.Queue()
        for r in replicas:
            self._q.put_nowait(r)

    async def checkout(self) -> Replica:
        return await self._q.get()

    def checkout_nowait(self) -> Replica | None:
        try:
            return self._q.get_nowait()
        except asyncio.QueueEmpty:
            return None

    def checkin(self, replica: Replica) -> None:
        self._q.put_nowait(replica)


class WeightStore:
    """Old weight versions are dropped only when nobody holds them."""

    def __init__(self) -> None:
        self.latest = 0
        self.holders: dict[int, int] = {}

    def hold(self, version: int | None = None) -> int:
        v = self.latest if version is None else version
        self.holders[v] = self.holders.get(v, 0) + 1
        return v

    def drop(self, version: int) -> None:
        self.holders[version] -= 1
        if not self.holders[version]:
            del self.holders[version]


@dataclass
class Trajectory:
    prompt: str
    turns: list[str] = field(default_factory=list)
    version: int = -1
    replica: Replica | None = None
    reward: float = 0.0


class RolloutManager:
    def __init__(self, pool: ReplicaPool, weights: WeightStore, tool: ToolFn) -> None:
        self.pool = pool
        self.weights = weights
        self.tool = tool
        self.partial: dict[int, Trajectory] = {}
        self.done: list[Trajectory] = []
        self.eval_replica: Replica | None = None

    async def single_turn(self, prompt: str) -> Trajectory | None:
        version = self.weights.hold()  # leak: not dropped when the engine is dead
        replica = await self.pool.checkout()  # clean: near miss, checked in by finally on both ways
        try:
            text = await replica.generate(prompt)
        except EngineDead:
            logger.warning("replica %d is dead", replica.index)
            return None
        finally:
            self.pool.checkin(replica)
        self.weights.drop(version)
        return Trajectory(prompt, [text], version)

    async def multi_turn(self, prompt: str, max_turns: int) -> Trajectory:
        traj = Trajectory(prompt)
        replica = await self.pool.checkout()  # clean: near miss, `break` leads to the checkin
        for _ in range(max_turns):
            try:
                text = await replica.generate(prompt)
            except EngineDead:
                break
            traj.turns.append(text)
            if "<tool>" not in text:
                break
            prompt = text + await self.tool(text)
        self.pool.checkin(replica)
        return traj

    async def with_retry(self, prompt: str, tries: int = 3) -> str | None:
        for _ in range(tries):
            replica = await self.pool.checkout()  # leak: a dead engine's replica is not checked in before the next try
            try:
                text = await replica.generate(prompt)
            except EngineDead:
                await asyncio.sleep(0.1)
                continue
            self.pool.checkin(replica)
            return text
        return None

    async def failover(self, prompt: str) -> str | None:
        replica = await self.pool.checkout()  # clean: near miss, checked in before the second is taken
        try:
            return await replica.generate(prompt)
        except EngineDead:
            pass
        finally:
            self.pool.checkin(replica)
        other = await self.pool.checkout()  # clean: checked in by finally
        try:
            return await other.generate(prompt)
        except EngineDead:
            return None
        finally:
            self.pool.checkin(other)

    async def start_partial(self, key: int, prompt: str) -> bool:
        if key in self.partial:
            return False
        replica = self.pool.checkout_nowait()  # clean: in the trajectory, checked in by finish_partial or abort_partial
        if replica is None:
            return False
        version = self.weights.hold()  # leak: abort_partial checks the replica in and keeps the version
        self.partial[key] = Trajectory(prompt, version=version, replica=replica)
        return True

    async def step_partial(self, key: int) -> bool:
        traj = self.partial[key]
        assert traj.replica is not None
        try:
            traj.turns.append(await traj.replica.generate(traj.prompt))
        except EngineDead:
            self.abort_partial(key)
            return False
        return True

    def finish_partial(self, key: int) -> Trajectory:
        traj = self.partial.pop(key)
        if traj.replica is not None:
            self.pool.checkin(traj.replica)
            traj.replica = None
        self.weights.drop(traj.version)
        self.done.append(traj)
        return traj

    def abort_partial(self, key: int) -> None:
        traj = self.partial.pop(key, None)
        if traj is not None and traj.replica is not None:
            self.pool.checkin(traj.replica)
            traj.replica = None

    def update_all(self, n: int) -> int:
        taken: list[Replica] = []
        while len(taken) < n:
            replica = self.pool.checkout_nowait()  # leak: with fewer than n idle the replicas that were taken are dropped
            if replica is None:
                return 0
            taken.append(replica)
        self.weights.latest += 1
        for r in taken:
            r.version = self.weights.latest
            self.pool.checkin(r)
        return len(taken)

    def update_idle(self) -> int:
        taken: list[Replica] = []
        while True:
            replica = self.pool.checkout_nowait()  # clean: near miss, all in taken are checked in below
            if replica is None:
                break
            taken.append(replica)
        random.shuffle(taken)
        for r in taken:
            r.version = self.weights.latest
            self.pool.checkin(r)
        return len(taken)

    async def reserve_eval(self) -> Replica:
        if self.eval_replica is not None:
            self.pool.checkin(self.eval_replica)
            self.eval_replica = None
        self.eval_replica = await self.pool.checkout()  # clean: near miss, the earlier one was checked in first
        return self.eval_replica

    def release_eval(self) -> None:
        if self.eval_replica is not None:
            self.pool.checkin(self.eval_replica)
            self.eval_replica = None
