"""Vectorised environment pool shared by the rollout actors of one host."""
from __future__ import annotations

import logging
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Callable, Optional

log = logging.getLogger("rollout.envs")

Policy = Callable[[list], int]
KNOWN_TASKS = {"reach", "push", "stack", "peg"}


@dataclass
class EnvSlot:
    index: int
    task: str = ""
    seed: int = 0
    steps: int = 0
    healthy: bool = True
    obs: list = field(default_factory=list)

    def reset(self, task: str, seed: int) -> list:
        rng = random.Random(seed)
        self.task, self.seed, self.steps = task, seed, 0
        self.obs = [rng.random() for _ in range(8)]
        return self.obs

    def step(self, action: int):
        self.steps += 1
        self.obs = [0.99 * x + 0.01 * action for x in self.obs]
        return self.obs, sum(self.obs) / len(self.obs), self.steps >= 200


class EnvPool:
    def __init__(self, size: int) -> None:
        self._idle = [EnvSlot(i) for i in range(size)]
        self._busy: dict[int, EnvSlot] = {}
        self._cond = threading.Condition()

    def checkout(self) -> EnvSlot:
        with self._cond:
            while not self._idle:
                self._cond.wait(0.5)
            slot = self._idle.pop()
            self._busy[slot.index] = slot
            return slot

    def try_checkout(self) -> Optional[EnvSlot]:
        with self._cond:
            if not self._idle:
                return None
            slot = self._idle.pop()
            self._busy[slot.index] = slot
            return slot

    def checkin(self, slot: EnvSlot) -> None:
        with self._cond:
            self._busy.pop(slot.index, None)
            slot.obs = []
            self._idle.append(slot)
            self._cond.notify()

    def busy_count(self) -> int:
        with self._cond:
            return len(self._busy)


def rollout(pool: EnvPool, policy: Policy, task: str, horizon: int, seed: int) -> list:
    slot = pool.checkout()  # clean: given back in finally
    traj = []
    try:
        obs = slot.reset(task, seed)
        for _ in range(horizon):
            action = policy(obs)
            obs, reward, done = slot.step(action)
            traj.append((obs, action, reward))
            if done:
                return traj
        return traj
    finally:
        pool.checkin(slot)


def mean_first_reward(pool: EnvPool, policy: Policy, tasks: list) -> dict:
    scores = {}
    for task in tasks:
        slot = pool.checkout()  # leak: the continue on an unknown task skips the checkin
        if task not in KNOWN_TASKS:
            log.warning("task %s is not registered", task)
            continue
        obs = slot.reset(task, seed=0)
        _, reward, _ = slot.step(policy(obs))
        scores[task] = reward
        pool.checkin(slot)
    return scores


def take_healthy(pool: EnvPool, attempts: int) -> Optional[EnvSlot]:
    for n in range(attempts):
        slot = pool.checkout()  # leak: an unhealthy slot is left behind when the next try rebinds the name
        if slot.healthy:
            return slot
        log.info("slot %d unhealthy, try %d", slot.index, n)
        time.sleep(0.01 * n)
    return None


def take_seeded(pool: EnvPool, task: str, seed: int) -> EnvSlot:
    slot = pool.checkout()  # clean: handed to the caller
    slot.reset(task, seed)
    return slot


def smoke_observation(pool: EnvPool, task: str) -> list:
    slot = take_seeded(pool, task, seed=7)  # leak: the observation is copied and the slot dropped
    first = list(slot.obs)
    for i, value in enumerate(first):
        if value > 1.0:
            first[i] = 1.0
    return first


def paired_advantage(pool: EnvPool, left: Policy, right: Policy, task: str) -> Optional[float]:
    a = pool.checkout()  # leak: the None answer for the second slot returns with the first one held
    b = pool.try_checkout()  # clean: checked in below when it is not None
    if b is None:
        log.debug("only one slot is idle")
        return None
    ra = a.step(left(a.reset(task, 3)))[1]
    rb = b.step(right(b.reset(task, 3)))[1]
    pool.checkin(b)
    pool.checkin(a)
    return ra - rb


def paired_horizon(pool: EnvPool, task: str) -> Optional[int]:
    a = pool.try_checkout()  # clean: near miss, every return after the None check gives it back
    if a is None:
        return None
    b = pool.try_checkout()  # clean: None or checked in at the end
    if b is None:
        pool.checkin(a)
        return None
    a.reset(task, 0)
    b.reset(task, 1)
    steps = min(a.step(0)[2], b.step(0)[2])
    for slot in (a, b):
        pool.checkin(slot)
    return int(steps)


def evaluate(pool: EnvPool, policy: Policy, task: str, slot: Optional[EnvSlot] = None) -> float:
    borrowed = slot is None
    if borrowed:
        slot = pool.checkout()  # clean: near miss, the same flag guards the checkin
    obs = slot.reset(task, 11)
    total = 0.0
    for _ in range(50):
        obs, reward, done = slot.step(policy(obs))
        total += reward
    if borrowed:
        pool.checkin(slot)
    return total


def prewarm(pool: EnvPool, task: str, count: int) -> float:
    started = time.monotonic()
    held = []
    while len(held) < count:
        slot = pool.try_checkout()  # clean: near miss, the list is drained below
        if slot is None:
            break
        slot.reset(task, len(held))
        held.append(slot)
    while held:
        pool.checkin(held.pop())
    return time.monotonic() - started


class RolloutActor:
    """Holds the slot of its current task until stop()."""

    def __init__(self, pool: EnvPool, task: str) -> None:
        self.pool, self.task = pool, task
        self.slot: Optional[EnvSlot] = None

    def assign(self, task: str, seed: int) -> list:
        self.task = task
        self.slot = self.pool.checkout()  # leak: a second assign overwrites the slot in use without a checkin
        return self.slot.reset(task, seed)

    def run(self, policy: Policy, steps: int) -> float:
        total = 0.0
        if self.slot is None:
            return total
        for _ in range(steps):
            obs, reward, done = self.slot.step(policy(self.slot.obs))
            total += reward
            if done:
                self.slot.reset(self.task, self.slot.seed + 1)
        return total

    def stop(self) -> None:
        if self.slot is not None:
            self.pool.checkin(self.slot)
            self.slot = None


class SwitchingActor(RolloutActor):
    """Changes its task during the run; the previous slot goes back first."""

    def assign(self, task: str, seed: int) -> list:
        self.stop()
        self.task = task
        self.slot = self.pool.checkout()  # clean: near miss, stop() has given back the one that stood there
        return self.slot.reset(task, seed)
