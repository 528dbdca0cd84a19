from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any, Awaitable, Callable


@dataclass
class Env:
    uid: int
    task: str = ""
    steps: int = 0
    broken: bool = False

    def reset(self, task: str) -> dict[str, Any]:
        self.task, self.steps = task, 0
        return {"task": task, "obs": ""}

    def step(self, action: str) -> tuple[dict[str, Any], float, bool]:
        self.steps += 1
        return {"obs": action}, random.random(), self.steps > 20


class EnvBroker:
    """Hands out sandboxes to rollout workers."""

    def __init__(self, size: int):
        self._idle = asyncio.Queue()
        for i in range(size):
            self._idle.put_nowait(Env(i))
        self._leased: set[int] = set()

    async def lease(self) -> Env:
        env = await self._idle.get()  # clean: handed to the caller
        self._leased.add(env.uid)
        return env

    def try_lease(self) -> Env | None:
        if self._idle.empty():
            return None
        env = self._idle.get_nowait()  # clean: handed to the caller
        self._leased.add(env.uid)
        return env

    async def lease_healthy(self) -> Env:
        while True:
            env = await self._idle.get()  # leak: a broken environment is neither put back nor replaced
            if env.broken:
                continue
            self._leased.add(env.uid)
            return env

    def unlease(self, env: Env) -> None:
        self._leased.discard(env.uid)
        self._idle.put_nowait(env)


@dataclass
class Trajectory:
    prompt: str
    actions: list[str] = field(default_factory=list)
    reward: float = 0.0


Policy = Callable[[dict], Awaitable[str]]


class RolloutWorker:
    def __init__(self, broker: EnvBroker, policy: Policy, max_turns: int = 8):
        self.broker = broker
        self.policy = policy
        self.max_turns = max_turns
        self.gate = asyncio.Semaphore(4)

    async def rollout(self, prompt: str) -> Trajectory:
        env = await self.broker.lease()  # clean: the finally unleases
        try:
            traj = Trajectory(prompt)
            obs = env.reset(prompt)
            for _ in range(self.max_turns):
                action = await self.policy(obs)
                if action == "<eos>":
                    return traj
                obs, r, done = env.step(action)
                traj.actions.append(action)
                traj.reward += r
                if done:
                    break
            return traj
        finally:
            self.broker.unlease(env)

    async def rollout_fast(self, prompt: str) -> Trajectory | None:
        env = await self.broker.lease()  # leak: the empty action returns None without unlease
        traj = Trajectory(prompt)
        obs = env.reset(prompt)
        for _ in range(self.max_turns):
            action = await self.policy(obs)
            if not action:
                return None
            obs, r, done = env.step(action)
            traj.reward += r
            if done:
                break
        self.broker.unlease(env)
        return traj

    async def gated(self, prompt: str) -> Trajectory:
        await self.gate.acquire()  # clean: released in finally
        try:
            return await self.rollout(prompt)
        finally:
            self.gate.release()

    async def gated_short(self, prompt: str, limit: int) -> Trajectory | None:
        await self.gate.acquire()  # leak: long prompts return with the permit
        if len(prompt) > limit:
            return None
        t = await self.rollout(prompt)
        self.gate.release()
        return t

    async def group(self, prompt: str, n: int) -> list[Trajectory]:
        envs = [await self.broker.lease() for _ in range(n)]  # clean: near miss, every one is unleased in the loop
        out = []
        for env in envs:
            traj = Trajectory(prompt)
            obs = env.reset(prompt)
            action = await self.policy(obs)
            _, traj.reward, _ = env.step(action)
            out.append(traj)
            self.broker.unlease(env)
        return out

    async def best_of(self, prompt: str, n: int, goal: float) -> Trajectory | None:
        envs = [await self.broker.lease() for _ in range(n)]  # leak: the early return leaves the rest of the list leased
        for env in envs:
            obs = env.reset(prompt)
            _, reward, _ = env.step(await self.policy(obs))
            self.broker.unlease(env)
            if reward > goal:
                return Trajectory(prompt, reward=reward)
        return None

    async def poll(self, prompt: str, deadline: float) -> float:
        env = self.broker.try_lease()  # clean: near miss, only tried again while nothing came
        while env is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
            env = self.broker.try_lease()  # clean: unleased below when not None
        if env is None:
            return 0.0
        env.reset(prompt)
        _, r, _ = env.step("noop")
        self.broker.unlease(env)
        return r

    async def warm(self) -> bool:
        return (await self.broker.lease()).steps == 0  # leak: only the attribute is kept

    async def replace(self, old: Env) -> Env:
        fresh = await self.broker.lease_healthy()  # clean: handed to the caller in exchange for the old one
        self.broker.unlease(old)
        return fresh

    async def retry(self, prompt: str) -> float:
        env = await self.broker.lease()  # clean: near miss, replace() unleases the old one
        for attempt in range(3):
            env.reset(prompt)
            _, r, _ = env.step("start")
            if r > 0.1:
                break
            env = await self.replace(env)  # clean: the last one is unleased after the loop
        self.broker.unlease(env)
        return r
