"""Asynchronous rollout collection against a bounded set of environments.

Environments are expensive (each one is a sandboxed subprocess), so workers
lease them from an :class:`EnvBank`.  ``lend`` waits for one, ``lend_nowait``
gives ``None`` when all are busy, ``restore`` gives one back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
from typing import Any, AsyncIterator, Awaitable, Callable, Dict, List, Optional, Protocol

logger = logging.getLogger("rl.rollout")


class EnvCrashed(RuntimeError):
    """The sandbox behind an environment has died."""


class Policy(Protocol):
    async def act(self, obs: Any) -> int: ...


class SandboxEnv:
    def __init__(self, index: int) -> None:
        self.index = index
        self.alive = True
        self.steps = 0

    async def reset(self, seed: int) -> Any:
        await asyncio.sleep(0)
        if not self.alive:
            raise EnvCrashed(self.index)
        self.steps = 0
        return seed

    async def step(self, action: int) -> tuple[Any, float, bool]:
        await asyncio.sleep(0)
        if random.random() < 1e-4:
            self.alive = False
            raise EnvCrashed(self.index)
        self.steps += 1
        return action, random.random(), self.steps >= 128

    def revive(self) -> None:
        self.alive = True


class EnvBank:
    def __init__(self, size: int) -> None:
        self._ready: asyncio.Queue[SandboxEnv] = asyncio.Queue()
        for i in range(size):
            self._ready.put_nowait(SandboxEnv(i))

    async def lend(self) -> SandboxEnv:
        return await self._ready.get()  # clean: handed to the caller

    async def lend_healthy(self) -> SandboxEnv:
        while True:
            env = await self._ready.get()  # clean: a dead one is revived before it is returned
            if not env.alive:
                env.revive()
            return env

    def lend_nowait(self) -> Optional[SandboxEnv]:
        try:
            env = self._ready.get_nowait()  # leak: a dead environment is neither returned nor queued again
        except asyncio.QueueEmpty:
            return None
        return env if env.alive else None

    async def restore(self, env: SandboxEnv) -> None:
        await self._ready.put(env)

    def restore_nowait(self, env: SandboxEnv) -> None:
        self._ready.put_nowait(env)

    @contextlib.asynccontextmanager
    async def lent(self) -> AsyncIterator[SandboxEnv]:
        env = await self.lend()  # clean: finally around the yield
        try:
            yield env
        finally:
            self.restore_nowait(env)


@dataclasses.dataclass
class Trajectory:
    seed: int
    rewards: List[float] = dataclasses.field(default_factory=list)
    truncated: bool = False


@dataclasses.dataclass
class RolloutConfig:
    horizon: int = 256
    step_timeout: float = 10.0
    retries: int = 3


async def run_episode(env: SandboxEnv, policy: Policy, seed: int, horizon: int) -> Trajectory:
    traj = Trajectory(seed)
    obs = await env.reset(seed)
    for _ in range(horizon):
        obs, reward, done = await env.step(await policy.act(obs))
        traj.rewards.append(reward)
        if done:
            return traj
    traj.truncated = True
    return traj


class RolloutWorker:
    def __init__(self, bank: EnvBank, policy: Policy, cfg: RolloutConfig) -> None:
        self.bank = bank
        self.policy = policy
        self.cfg = cfg
        self._sessions: Dict[str, SandboxEnv] = {}
        self._tasks: Dict[int, asyncio.Task[Trajectory]] = {}

    async def collect(self, seed: int) -> Optional[Trajectory]:
        env = await self.bank.lend()  # leak: a crash or a timeout is logged and the environment forgotten
        try:
            traj = await asyncio.wait_for(
                run_episode(env, self.policy, seed, self.cfg.horizon), self.cfg.step_timeout * self.cfg.horizon
            )
        except (EnvCrashed, asyncio.TimeoutError) as exc:
            logger.warning("seed %d lost: %r", seed, exc)
            return None
        await self.bank.restore(env)
        return traj

    async def collect_with_retry(self, seed: int) -> Trajectory:
        last: Optional[Exception] = None
        for attempt in range(self.cfg.retries):
            env = await self.bank.lend_healthy()  # clean: each attempt's finally restores its own environment
            try:
                return await run_episode(env, self.policy, seed + attempt, self.cfg.horizon)
            except EnvCrashed as exc:
                last = exc
                env.revive()
                continue
            finally:
                self.bank.restore_nowait(env)
        raise RuntimeError(f"seed {seed}: gave up") from last

    async def collect_hedged(self, seed: int) -> Optional[Trajectory]:
        """Start an episode; on a crash move to a second environment and go on."""
        env = await self.bank.lend()  # leak: after a crash the name is bound to the replacement only
        for _ in range(self.cfg.retries):
            try:
                traj = await run_episode(env, self.policy, seed, self.cfg.horizon)
            except EnvCrashed:
                env = await self.bank.lend_healthy()  # leak: a second crash rebinds over the replacement
                continue
            await self.bank.restore(env)
            return traj
        await self.bank.restore(env)
        return None

    async def collect_cancellable(self, seed: int) -> Trajectory:
        env = await self.bank.lend()  # clean: cancellation and crash restore it, and so does the normal way
        try:
            traj = await run_episode(env, self.policy, seed, self.cfg.horizon)
        except asyncio.CancelledError:
            self.bank.restore_nowait(env)
            raise
        except EnvCrashed:
            env.revive()
            self.bank.restore_nowait(env)
            return Trajectory(seed, truncated=True)
        self.bank.restore_nowait(env)
        return traj

    # -- tasks that carry their environment ---------------------------------
    async def spawn(self, seed: int) -> None:
        if seed in self._tasks:
            return
        env = await self.bank.lend()  # clean: the done callback restores it however the task ends
        task = asyncio.ensure_future(run_episode(env, self.policy, seed, self.cfg.horizon))
        task.add_done_callback(lambda _t, e=env: self.bank.restore_nowait(e))
        self._tasks[seed] = task

    async def spawn_driven(self, seed: int) -> None:
        env = await self.bank.lend()  # leak: _drive restores only when the episode neither crashes nor is cancelled
        self._tasks[seed] = asyncio.ensure_future(self._drive(env, seed))

    async def _drive(self, env: SandboxEnv, seed: int) -> Trajectory:
        traj = await run_episode(env, self.policy, seed, self.cfg.horizon)
        await self.bank.restore(env)
        return traj

    async def join(self) -> List[Trajectory]:
        tasks, self._tasks = list(self._tasks.values()), {}
        done = await asyncio.gather(*tasks, return_exceptions=True)
        return [t for t in done if isinstance(t, Trajectory)]

    def abort(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    # -- interactive sessions -------------------------------------------------
    async def open_session(self, sid: str) -> SandboxEnv:
        env = self._sessions.get(sid)
        if env is None:
            env = await self.bank.lend_healthy()  # leak: two openers of one sid both wait here, the later one overwrites
            self._sessions[sid] = env
        return env

    async def close_session(self, sid: str) -> None:
        env = self._sessions.pop(sid, None)
        if env is not None:
            await self.bank.restore(env)

    async def swap_session(self, sid: str) -> None:
        fresh = self.bank.lend_nowait()  # clean: either becomes the session's or goes back
        if fresh is None:
            return
        old = self._sessions.get(sid)
        if old is None:
            self.bank.restore_nowait(fresh)
            return
        self._sessions[sid] = fresh
        self.bank.restore_nowait(old)


async def evaluate(bank: EnvBank, policy: Policy, seeds: List[int]) -> float:
    total = 0.0
    for seed in seeds:
        async with bank.lent() as env:  # clean: async context manager
            try:
                traj = await run_episode(env, policy, seed, 64)
            except EnvCrashed:
                continue
            if not traj.rewards:
                break
            total += sum(traj.rewards)
    return total


async def paired(bank: EnvBank, fn: Callable[[SandboxEnv, SandboxEnv], Awaitable[float]]) -> Optional[float]:
    """Run ``fn`` on two environments at once, or not at all."""
    first = bank.lend_nowait()  # clean: goes back when there is no second
    if first is None:
        return None
    second = bank.lend_nowait()  # clean: both are restored in the finally
    if second is None:
        bank.restore_nowait(first)
        return None
    try:
        return await fn(first, second)
    finally:
        for env in (first, second):
            bank.restore_nowait(env)


async def health_sweep(bank: EnvBank, count: int) -> int:
    """Reset up to ``count`` environments and report how many answer."""
    healthy = 0
    for seed in range(count):
        env = await bank.lend()  # leak: the continue in the handler passes over the restore
        try:
            await env.reset(seed)
        except EnvCrashed:
            logger.error("env %d does not answer", env.index)
            continue
        healthy += 1
        await bank.restore(env)
    return healthy
