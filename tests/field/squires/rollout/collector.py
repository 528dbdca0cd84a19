"""The collection loop: actors play, the learner takes what is fresh enough."""
from __future__ import annotations

import asyncio
import logging
from typing import Any, AsyncIterator

import numpy as np

from .envs import Env, EnvPool, ResetFailed
from .episodes import best_of, play
from .trajectories import ArenaFull, RowArena, Trajectory

log = logging.getLogger("rollout.collector")


class Collector:
    def __init__(self, pool: EnvPool, arena: RowArena, policy: Any, max_lag: int = 2):
        self.pool, self.arena, self.policy, self.max_lag = pool, arena, policy, max_lag
        self._ready: asyncio.Queue[Trajectory] = asyncio.Queue()
        self._paused: dict[str, Env] = {}
        self._demos: list[Trajectory] = []
        self._halt = False
        self.stale = 0

    async def actor(self, tasks: asyncio.Queue) -> None:
        while not self._halt:
            task = await tasks.get()
            try:
                trajectory = await play(self.pool, self.arena, self.policy, task)  # leak: batches() skips a stale trajectory without discarding it
            except (ResetFailed, ArenaFull) as exc:
                log.info("task %s goes back: %s", task["id"], exc)
                tasks.put_nowait(task)
                await asyncio.sleep(0.5)
                continue
            if trajectory is not None:
                self._ready.put_nowait(trajectory)

    async def batches(self, size: int) -> AsyncIterator[list[tuple[np.ndarray, float]]]:
        batch = []
        while not self._halt:
            trajectory = await self._ready.get()
            if trajectory.version < self.policy.version - self.max_lag:
                self.stale += 1
                continue
            batch.append(trajectory.seal())
            if len(batch) == size:
                yield batch
                batch = []

    async def add_demo(self, task: dict) -> bool:
        demo = await best_of(self.pool, self.arena, self.policy, task, 8)  # clean: near miss, kept in the list, close() discards it
        if demo is None:
            return False
        self._demos.append(demo)
        return True

    async def evaluate(self, tasks: list[dict]) -> float:
        total = 0.0
        for task in tasks:
            async with self.pool.borrowed(task) as (env, observation):  # clean: context manager
                done = False
                while not done:
                    observation, reward, done = await env.step(await self.policy.act(observation))
                    total += reward
        return total / max(len(tasks), 1)

    # A person can take over an environment in the middle of a task, by way of the web page.

    async def take_over(self, task: dict) -> list[int]:
        if task["id"] in self._paused:
            raise KeyError(f"task {task['id']} is taken over already")
        env, observation = await self.pool.lend(task)  # leak: human_step() drops the environment from the table when the episode is done
        self._paused[task["id"]] = env
        return observation

    async def human_step(self, task_id: str, action: list[int]) -> list[int] | None:
        observation, reward, done = await self._paused[task_id].step(action)
        if done:
            log.info("task %s solved by hand, reward %.2f", task_id, reward)
            del self._paused[task_id]
            return None
        return observation

    def hand_over(self, task_id: str) -> None:
        env = self._paused.pop(task_id, None)
        if env is not None:
            self.pool.reclaim(env)

    def close(self) -> None:
        self._halt = True
        while not self._ready.empty():
            self._ready.get_nowait().discard()
        for demo in self._demos:
            demo.discard()
        self._demos.clear()
        for task_id in list(self._paused):
            self.hand_over(task_id)
