"""Asynchronous rollouts for RL fine-tuning.

Environments are costly to start, so they live in an `EnvPool`. The inference
engine limits the number of concurrent generations by tickets.
"""
from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass, field
from typing import Any, Awaitable, Callable, Optional


class EnvDied(RuntimeError):
    pass


class Env:
    def __init__(self, index: int):
        self.index = index
        self.healthy = True

    async def reset(self, task: str) -> str:
        await asyncio.sleep(0)
        return f"{task}:start"

    async def step(self, action: str) -> tuple[str, float, bool]:
        if not self.healthy:
            raise EnvDied(str(self.index))
        await asyncio.sleep(0)
        return action[::-1], random.random(), random.random() < 0.1


class EnvPool:
    def __init__(self, n: int):
        self._q: asyncio.Queue[Env] = asyncio.Queue()
        self._ids = itertools.count(n)
        for i in range(n):
            self._q.put_nowait(Env(i))

    async def lend(self) -> Env:
        return await self._q.get()  # clean: lent to the caller

    async def lend_healthy(self) -> Env:
        while True:
            env = await self._q.get()  # clean: near miss, a dead one is replaced in the queue
            if env.healthy:
                return env
            self._q.put_nowait(Env(next(self._ids)))

    def lend_now(self) -> Optional[Env]:
        if self._q.empty():
            return None
        env = self._q.get_nowait()  # leak: an unhealthy environment is taken off and the queue shrinks by one
        if not env.healthy:
            return None
        return env

    def back(self, env: Env) -> None:
        self._q.put_nowait(env)


class Tickets:
    """Counts generations in flight; `weight` lets long prompts count more."""

    def __init__(self, total: int):
        self.total = total
        self.used = 0

    def claim(self, weight: int = 1) -> bool:
        if self.used + weight > self.total:
            return False
        self.used += weight
        return True

    def unclaim(self, weight: int = 1) -> None:
        self.used -= weight


@dataclass
class Episode:
    task: str
    env: Optional[Env] = None
    steps: list[tuple[str, float]] = field(default_factory=list)
    weight: int = 0
    done: bool = False

    @property
    def ret(self) -> float:
        return sum(r for _, r in self.steps)


Policy = Callable[[str], Awaitable[str]]


class RolloutWorker:
    def __init__(self, pool: EnvPool, tickets: Tickets, policy: Policy, horizon: int = 64):
        self.pool = pool
        self.tickets = tickets
        self.policy = policy
        self.horizon = horizon
        self.live: dict[str, Episode] = {}
        self.retired: list[float] = []

    async def run_episode(self, task: str) -> Episode:
        ep = Episode(task)
        env = await self.pool.lend()  # clean: given back in finally
        try:
            obs = await env.reset(task)
            for _ in range(self.horizon):
                act = await self.policy(obs)
                obs, reward, done = await env.step(act)
                ep.steps.append((act, reward))
                if done:
                    ep.done = True
                    break
        finally:
            self.pool.back(env)
        return ep

    async def run_group(self, task: str, n: int) -> list[Episode]:
        envs = [await self.pool.lend_healthy() for _ in range(n)]  # leak: the environments do not go back when one of the group dies
        try:
            eps = await asyncio.gather(*(self._drive(task, e) for e in envs))
        except EnvDied:
            return []
        for e in envs:
            self.pool.back(e)
        return list(eps)

    async def _drive(self, task: str, env: Env) -> Episode:
        ep = Episode(task)
        obs = await env.reset(task)
        while len(ep.steps) < self.horizon:
            act = await self.policy(obs)
            obs, reward, ep.done = await env.step(act)
            ep.steps.append((act, reward))
            if ep.done:
                break
        return ep

    async def generate(self, prompt: str) -> Optional[str]:
        weight = 2 if len(prompt) > 4096 else 1
        if not self.tickets.claim(weight):  # clean: unclaimed in finally with the same weight
            return None
        try:
            return await self.policy(prompt)
        finally:
            self.tickets.unclaim(weight)

    async def generate_with_retry(self, prompt: str, attempts: int = 3) -> Optional[str]:
        for i in range(attempts):
            while not self.tickets.claim():  # leak: an attempt that times out keeps its ticket and the next claims one more
                await asyncio.sleep(0.01)
            try:
                out = await asyncio.wait_for(self.policy(prompt), timeout=30)
            except asyncio.TimeoutError:
                await asyncio.sleep(2**i)
                continue
            self.tickets.unclaim()
            return out
        return None

    # -- long-lived episodes, stepped by the trainer -----------------------

    async def begin(self, task: str) -> bool:
        if task in self.live:
            return False
        ep = Episode(task)
        ep.weight = 2 if task.startswith("long/") else 1
        if not self.tickets.claim(ep.weight):  # clean: near miss, the weight kept in the episode is unclaimed in end() or here
            return False
        env = self.pool.lend_now()  # clean: moved to the episode in self.live, end() gives it back
        if env is None:
            self.tickets.unclaim(ep.weight)
            return False
        ep.env = env
        self.live[task] = ep
        await env.reset(task)
        return True

    async def advance(self, task: str, obs: str) -> Optional[str]:
        ep = self.live[task]
        assert ep.env is not None
        act = await self.policy(obs)
        obs, reward, done = await ep.env.step(act)
        ep.steps.append((act, reward))
        if done:
            self.end(task)
            return None
        return obs

    def end(self, task: str) -> None:
        ep = self.live.pop(task)
        self.tickets.unclaim(ep.weight)
        self.retired.append(ep.ret)
        if ep.env is not None:
            self.pool.back(ep.env)
            ep.env = None

    async def branch(self, task: str, suffix: str) -> Episode:
        """Fork an episode for tree search; the fork runs on its own environment."""
        src = self.live[task]
        env = await self.pool.lend()  # leak: the fork is never put in self.live, end() cannot reach its environment
        fork = Episode(task + suffix, env=env, steps=list(src.steps))
        await env.reset(fork.task)
        for act, _ in src.steps:
            await env.step(act)
        return await self._finish_fork(fork)

    async def _finish_fork(self, fork: Episode) -> Episode:
        assert fork.env is not None
        done_ep = await self._drive(fork.task, fork.env)
        done_ep.steps = fork.steps + done_ep.steps
        return done_ep

    async def spawn_eval(self, tasks: list[str], background: set[asyncio.Task[Any]]) -> None:
        for name in tasks:
            env = await self.pool.lend_healthy()  # clean: near miss, the done callback gives it back
            job = asyncio.create_task(self._drive(name, env))
            background.add(job)
            job.add_done_callback(lambda t, e=env: (background.discard(t), self.pool.back(e)))

    async def spawn_replay(self, tasks: list[str], background: set[asyncio.Task[Any]]) -> None:
        for name in tasks:
            env = await self.pool.lend()  # leak: the done callback only forgets the task, the environment stays lent
            job = asyncio.create_task(self._drive(name, env))
            background.add(job)
            job.add_done_callback(background.discard)
