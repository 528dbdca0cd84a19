"""Agentic rollouts for RL: environment slots, generation quotas and trajectory buffers."""
from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Sandbox:
    env_id: int
    steps: int = 0
    alive: bool = True

    async def reset(self, task: str) -> str:
        await asyncio.sleep(0)
        self.steps = 0
        return f"{task}:start"

    async def step(self, action: str) -> tuple[str, float, bool]:
        await asyncio.sleep(0)
        self.steps += 1
        return action, random.random(), self.steps >= 4


class SandboxPool:
    def __init__(self, size: int) -> None:
        self._queue: asyncio.Queue[Sandbox] = asyncio.Queue()
        for i in range(size):
            self._queue.put_nowait(Sandbox(i))

    async def checkout(self) -> Sandbox:
        return await self._queue.get()

    def checkout_nowait(self) -> Sandbox | None:
        return None if self._queue.empty() else self._queue.get_nowait()

    def checkin(self, env: Sandbox) -> None:
        env.alive = True
        self._queue.put_nowait(env)


class SandboxLease:
    def __init__(self, pool: SandboxPool) -> None:
        self.pool = pool
        self.env: Sandbox | None = None

    async def __aenter__(self) -> Sandbox:
        self.env = await self.pool.checkout()  # leak: __aexit__ returns early for a dead sandbox and never checks it in
        return self.env

    async def __aexit__(self, *exc: Any) -> None:
        if self.env is None or not self.env.alive:
            return
        self.pool.checkin(self.env)
        self.env = None


class TokenQuota:
    def __init__(self, total: int) -> None:
        self.left = total

    def draw(self, n: int) -> bool:
        if n > self.left:
            return False
        self.left -= n
        return True

    def refund(self, n: int) -> None:
        self.left += n


@dataclass
class Trajectory:
    task: str
    max_tokens: int
    observations: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    env: Sandbox | None = None


class RolloutManager:
    def __init__(self, envs: SandboxPool, quota: TokenQuota) -> None:
        self.envs = envs
        self.quota = quota
        self.suspended: dict[str, Trajectory] = {}
        self.validators: list[Sandbox] = []
        self.outbox: asyncio.Queue[Trajectory] = asyncio.Queue()

    async def _play(self, env: Sandbox, traj: Trajectory) -> bool:
        traj.observations.append(await env.reset(traj.task))
        done = False
        while not done:
            obs, reward, done = await env.step("act")
            traj.observations.append(obs)
            traj.rewards.append(reward)
        return sum(traj.rewards) > 0.1

    async def rollout(self, task: str, max_tokens: int) -> Trajectory | None:
        if not self.quota.draw(max_tokens):  # clean: near miss, refunded in the finally, whether finished or cancelled
            return None
        traj = Trajectory(task, max_tokens)
        try:
            env = await self.envs.checkout()  # clean: checked in by the inner finally
            try:
                await asyncio.wait_for(self._play(env, traj), timeout=60)
            except asyncio.TimeoutError:
                return None
            finally:
                self.envs.checkin(env)
            return traj
        finally:
            self.quota.refund(max_tokens)

    async def rollout_group(self, task: str, n: int, max_tokens: int) -> list[Trajectory]:
        if not self.quota.draw(n * max_tokens):  # leak: only the refund of one trajectory's tokens, not of all n
            return []
        group = [Trajectory(task, max_tokens) for _ in range(n)]
        for traj in group:
            env = await self.envs.checkout()  # clean: checked in after each play
            try:
                await self._play(env, traj)
            finally:
                self.envs.checkin(env)
        self.quota.refund(max_tokens)
        return group

    async def rollout_filtered(self, tasks: list[str]) -> list[Trajectory]:
        kept = []
        for task in tasks:
            env = self.envs.checkout_nowait()  # leak: a trajectory with low reward is skipped before the check-in
            if env is None:
                break
            traj = Trajectory(task, 0)
            if not await self._play(env, traj):
                continue
            kept.append(traj)
            self.envs.checkin(env)
        return kept

    async def rollout_kept(self, tasks: list[str]) -> list[Trajectory]:
        kept = []
        for task in tasks:
            env = await self.envs.checkout()  # clean: near miss, the continue passes the finally
            try:
                traj = Trajectory(task, 0)
                if not await self._play(env, traj):
                    continue
                kept.append(traj)
            finally:
                self.envs.checkin(env)
        return kept

    async def begin(self, uid: str, task: str, max_tokens: int) -> bool:
        if uid in self.suspended:
            return False
        if not self.quota.draw(max_tokens):  # clean: near miss, resume and drop both refund traj.max_tokens
            return False
        env = self.envs.checkout_nowait()  # leak: drop refunds the quota and forgets the sandbox in the trajectory
        if env is None:
            self.quota.refund(max_tokens)
            return False
        traj = Trajectory(task, max_tokens, env=env)
        traj.observations.append(await env.reset(task))
        self.suspended[uid] = traj
        return True

    async def resume(self, uid: str) -> Trajectory | None:
        traj = self.suspended.pop(uid, None)
        if traj is None:
            return None
        try:
            await self._play(traj.env, traj)
        finally:
            self.envs.checkin(traj.env)
            self.quota.refund(traj.max_tokens)
        return traj

    def drop(self, uid: str) -> None:
        traj = self.suspended.pop(uid, None)
        if traj is not None:
            self.quota.refund(traj.max_tokens)

    async def smoke_test(self, task: str) -> bool:
        async with SandboxLease(self.envs) as env:
            env.alive = "start" in await env.reset(task)
            return env.alive

    async def dispatch(self, task: str) -> None:
        env = await self.envs.checkout()  # clean: near miss, travels in the trajectory, collect checks it in
        traj = Trajectory(task, 0, env=env)
        await self.outbox.put(traj)

    async def collect(self) -> Trajectory:
        traj = await self.outbox.get()
        try:
            await self._play(traj.env, traj)
        finally:
            self.envs.checkin(traj.env)
            traj.env = None
        return traj

    def reserve_validators(self, n: int) -> int:
        while len(self.validators) < n:
            env = self.envs.checkout_nowait()  # clean: near miss, kept in validators until release_validators
            if env is None:
                break
            self.validators.append(env)
        return len(self.validators)

    def release_validators(self) -> None:
        while self.validators:
            self.envs.checkin(self.validators.pop())
