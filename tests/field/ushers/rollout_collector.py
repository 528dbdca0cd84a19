"""RL rollouts: engine leases, environment sessions and trajectory tickets."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Optional

logger = logging.getLogger(__name__)


class EngineBusy(Exception):
    pass


class EnvCrashed(Exception):
    pass


@dataclass
class EngineLease:
    rank: int
    version: int


class EnginePool:
    def __init__(self, ranks: list[int]) -> None:
        self._ready: asyncio.Queue[int] = asyncio.Queue()
        for r in ranks:
            self._ready.put_nowait(r)
        self.version = 0

    async def lease(self) -> EngineLease:
        rank = await self._ready.get()
        return EngineLease(rank, self.version)

    def lease_nowait(self) -> Optional[EngineLease]:
        try:
            return EngineLease(self._ready.get_nowait(), self.version)
        except asyncio.QueueEmpty:
            return None

    def restore(self, lease: EngineLease) -> None:
        self._ready.put_nowait(lease.rank)


class EnvServer:
    def __init__(self, factory, limit: int) -> None:
        self._factory = factory
        self._slots = asyncio.Semaphore(limit)
        self._open: dict[int, Any] = {}

    async def open_env(self, seed: int) -> int:
        await self._slots.acquire()  # clean: released by close_env
        env = self._factory(seed)
        self._open[id(env)] = env
        return id(env)

    def close_env(self, eid: int) -> None:
        env = self._open.pop(eid)
        env.close()
        self._slots.release()

    async def step(self, eid: int, action: str) -> tuple[str, float, bool]:
        return await self._open[eid].step(action)


class TicketWindow:
    def __init__(self, limit: int) -> None:
        self._left = limit

    def draw(self) -> bool:
        if self._left <= 0:
            return False
        self._left -= 1
        return True

    def put_back(self) -> None:
        self._left += 1


@dataclass
class Trajectory:
    prompt: str
    actions: list[str] = field(default_factory=list)
    reward: float = 0.0
    lease: Optional[EngineLease] = None


class RolloutCollector:
    def __init__(self, engines: EnginePool, envs: EnvServer, window: TicketWindow, client, max_turns: int) -> None:
        self.engines = engines
        self.envs = envs
        self.window = window
        self.client = client
        self.max_turns = max_turns
        self._partial: dict[str, Trajectory] = {}
        self._tasks: set[asyncio.Task] = set()

    async def rollout(self, prompt: str, seed: int) -> Optional[Trajectory]:
        lease = await self.engines.lease()  # clean: restored in finally
        try:
            eid = await self.envs.open_env(seed)  # leak: a crash returns without close_env
            traj = Trajectory(prompt)
            try:
                await self._play(traj, lease, eid)
            except EnvCrashed:
                logger.warning("seed %d crashed", seed)
                return None
            self.envs.close_env(eid)
            return traj
        finally:
            self.engines.restore(lease)

    async def _play(self, traj: Trajectory, lease: EngineLease, eid: int) -> None:
        obs = traj.prompt
        for _ in range(self.max_turns):
            action = await self.client.act(lease.rank, obs)
            traj.actions.append(action)
            obs, reward, done = await self.envs.step(eid, action)
            traj.reward += reward
            if done:
                break

    async def evaluate(self, prompt: str, seeds: list[int]) -> list[float]:
        scores: list[float] = []
        lease = await self.engines.lease()  # clean: restored after the loop
        for seed in seeds:
            eid = await self.envs.open_env(seed)  # clean: near miss, closed in the handler before continue
            traj = Trajectory(prompt)
            try:
                await self._play(traj, lease, eid)
            except EnvCrashed:
                self.envs.close_env(eid)
                continue
            self.envs.close_env(eid)
            scores.append(traj.reward)
        self.engines.restore(lease)
        return scores

    def spawn(self, prompt: str, seed: int) -> bool:
        if not self.window.draw():  # clean: near miss, put back by the done callback
            return False
        task = asyncio.create_task(self.rollout(prompt, seed))
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return True

    def _on_done(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        self.window.put_back()

    def spawn_fresh(self, prompt: str, seed: int, min_version: int) -> bool:
        if not self.window.draw():  # leak: a stale engine version returns without putting the ticket back
            return False
        if self.engines.version < min_version:
            return False
        task = asyncio.create_task(self.rollout(prompt, seed))
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return True

    async def begin_partial(self, key: str, prompt: str) -> None:
        lease = await self.engines.lease()  # leak: expire_partial drops the trajectory with its lease
        self._partial[key] = Trajectory(prompt, lease=lease)

    async def resume_partial(self, key: str, obs: str) -> str:
        traj = self._partial[key]
        action = await self.client.act(traj.lease.rank, obs)
        traj.actions.append(action)
        return action

    def finish_partial(self, key: str, reward: float) -> Trajectory:
        traj = self._partial.pop(key)
        traj.reward = reward
        self.engines.restore(traj.lease)
        traj.lease = None
        return traj

    def expire_partial(self, min_version: int) -> int:
        stale = [k for k, t in self._partial.items() if t.lease.version < min_version]
        for key in stale:
            del self._partial[key]
        return len(stale)

    async def sample_group(self, prompt: str, n: int) -> AsyncIterator[str]:
        lease = await self.engines.lease()  # clean: near miss, finally also where the consumer stops early
        try:
            for i in range(n):
                yield await self.client.sample(lease.rank, prompt, i)
        finally:
            self.engines.restore(lease)

    async def judge(self, text: str) -> Optional[float]:
        for _ in range(3):
            lease = self.engines.lease_nowait()  # leak: a busy engine is tried again with another lease
            if lease is None:
                return None
            try:
                score = await self.client.score(lease.rank, text)
            except EngineBusy:
                await asyncio.sleep(0.1)
                continue
            self.engines.restore(lease)
            return score
        return None

    async def update_weights(self, version: int, world: int) -> None:
        held = [await self.engines.lease() for _ in range(world)]  # clean: near miss, all restored in finally
        try:
            await asyncio.gather(*(self.client.load(h.rank, version) for h in held))
            self.engines.version = version
        finally:
            for h in held:
                self.engines.restore(h)

    async def probe(self, timeout: float) -> bool:
        lease = self.engines.lease_nowait()  # clean: near miss, restored when timed out or cancelled as well
        if lease is None:
            return False
        try:
            await asyncio.wait_for(self.client.ping(lease.rank), timeout)
            return True
        except asyncio.TimeoutError:
            return False
        finally:
            self.engines.restore(lease)
