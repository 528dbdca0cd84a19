"""Single episodes and groups of episodes of the same task."""
from __future__ import annotations

import asyncio
import logging

import numpy as np

from .envs import EnvPool
from .trajectories import RowArena, Trajectory, TrajectoryTooLong

log = logging.getLogger("rollout.episodes")

MAX_TURNS = 64


async def play(pool: EnvPool, arena: RowArena, policy, task: dict) -> Trajectory | None:
    """One episode. None when it does not fit in a row."""
    env, observation = await pool.lend(task)  # leak: ArenaFull is raised by the trajectory before the try begins
    trajectory = Trajectory(arena, policy.version)  # clean: near miss, discarded in both handlers, else returned
    try:
        trajectory.record(observation)
        for _ in range(MAX_TURNS):
            action = await policy.act(observation)
            observation, reward, done = await env.step(action)
            trajectory.record(action + observation, reward)
            if done:
                break
        return trajectory
    except TrajectoryTooLong as exc:
        log.info("task %s: %s", task["id"], exc)
        trajectory.discard()
        return None
    except BaseException:
        trajectory.discard()
        raise
    finally:
        pool.reclaim(env)


async def play_group(pool: EnvPool, arena: RowArena, policy, task: dict, count: int) -> list[Trajectory]:
    results = await asyncio.gather(
        *(play(pool, arena, policy, task) for _ in range(count)),  # clean: near miss, all that come back as trajectories are returned
        return_exceptions=True,
    )
    failed = [r for r in results if isinstance(r, BaseException)]
    if failed:
        log.warning("task %s: %d of %d episodes failed: %r", task["id"], len(failed), count, failed[0])
    return [r for r in results if isinstance(r, Trajectory)]


async def advantages(pool: EnvPool, arena: RowArena, policy, task: dict, count: int) -> list[tuple[np.ndarray, float]]:
    group = await play_group(pool, arena, policy, task, count)  # leak: the return for a group without spread drops all of its trajectories
    rewards = np.array([t.reward for t in group], np.float32)
    if len(group) < 2 or rewards.std() < 1e-6:
        log.debug("task %s teaches nothing", task["id"])
        return []
    scaled = (rewards - rewards.mean()) / rewards.std()
    return [(t.seal()[0], float(a)) for t, a in zip(group, scaled)]


async def best_of(pool: EnvPool, arena: RowArena, policy, task: dict, count: int) -> Trajectory | None:
    group = await play_group(pool, arena, policy, task, count)  # clean: the best is returned, the others are discarded
    group.sort(key=lambda t: t.reward)
    best = group.pop() if group else None
    for trajectory in group:
        trajectory.discard()
    return best


async def reproduces(pool: EnvPool, actions: list[list[int]], expected: list[float], task: dict) -> bool:
    """Replays recorded actions and compares the rewards."""
    env, _ = await pool.lend(task)  # leak: the return at the first reward that differs
    for turn, (action, want) in enumerate(zip(actions, expected)):
        _, reward, done = await env.step(action)
        if abs(reward - want) > 1e-4:
            log.error("turn %d of task %s gave %.3f instead of %.3f", turn, task["id"], reward, want)
            return False
        if done:
            break
    pool.reclaim(env)
    return True
