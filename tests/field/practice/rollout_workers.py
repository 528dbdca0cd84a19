"""RLHF rollouts: generation slots, trajectory buffers and the queue to the learner."""
from __future__ import annotations

import asyncio
import collections
import logging
import math
import typing
from dataclasses import dataclass, replace

import torch

if typing.TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Trajectory:
    buf: TrajBuffer
    prompt_id: int
    length: int = 0
    reward: float = math.nan


class TrajBuffer:
    def __init__(self, idx: int, max_len: int) -> None:
        self.idx = idx
        self.tokens = torch.zeros(max_len, dtype=torch.long)
        self.logprobs = torch.zeros(max_len)


class ReplayArena:
    def __init__(self, n: int, max_len: int) -> None:
        self._ready = collections.deque(TrajBuffer(i, max_len) for i in range(n))
        self._event = asyncio.Event()
        self.max_len = max_len

    async def lease_buffer(self) -> TrajBuffer:
        while not self._ready:
            self._event.clear()
            await self._event.wait()
        return self._ready.popleft()

    def lease_buffer_nowait(self) -> TrajBuffer | None:
        return self._ready.popleft() if self._ready else None

    def end_lease(self, b: TrajBuffer) -> None:
        self._ready.append(b)
        self._event.set()


class RolloutWorker:
    def __init__(self, policy, arena: ReplayArena, out: asyncio.Queue[Trajectory], reward_fn) -> None:
        self.policy = policy
        self.arena = arena
        self.out = out
        self.reward_fn = reward_fn
        self.groups: dict[int, list[Trajectory]] = {}
        self.inflight = asyncio.Semaphore(16)

    async def _generate(self, prompt_id: int, prompt: Sequence[int]) -> Trajectory:
        buf = await self.arena.lease_buffer()  # clean: travels to the caller in the trajectory
        traj = Trajectory(buf=buf, prompt_id=prompt_id)
        async for tok, lp in self.policy.stream(prompt):
            if traj.length == self.arena.max_len:
                break
            buf.tokens[traj.length], buf.logprobs[traj.length] = tok, lp
            traj.length += 1
        return traj

    async def rollout(self, prompt_id: int, prompt: Sequence[int]) -> None:
        traj = await self._generate(prompt_id, prompt)  # clean: queued, the learner ends the lease
        scored = replace(traj, reward=self.reward_fn(traj))
        await self.out.put(scored)

    async def rollout_filtered(self, prompt_id: int, prompt: Sequence[int], floor: float) -> bool:
        traj = await self._generate(prompt_id, prompt)  # leak: poor rewards return without the queue and without end_lease
        traj.reward = self.reward_fn(traj)
        if traj.reward < floor:
            return False
        await self.out.put(traj)
        return True

    async def best_of(self, n: int, prompt_id: int, prompt: Sequence[int]) -> Trajectory:
        trajs = await asyncio.gather(*[self._generate(prompt_id, prompt) for _ in range(n)])  # clean: near miss, all but the returned one are ended
        best = max(trajs, key=self.reward_fn)
        for t in trajs:
            if t is not best:
                self.arena.end_lease(t.buf)
        return best

    async def best_reward(self, n: int, prompt_id: int, prompt: Sequence[int]) -> float:
        best = await self.best_of(n, prompt_id, prompt)  # leak: only the reward of the best is passed on
        return self.reward_fn(best)

    async def group(self, gid: int, prompts: Sequence[Sequence[int]]) -> None:
        trajs = self.groups.setdefault(gid, [])
        for i, p in enumerate(prompts):
            trajs.append(await self._generate(i, p))  # clean: in the group, flush_group() or discard_group() end the leases

    async def flush_group(self, gid: int) -> None:
        for t in self.groups.pop(gid, []):
            await self.out.put(t)

    def discard_group(self, gid: int) -> None:
        for t in self.groups.pop(gid, []):
            self.arena.end_lease(t.buf)

    async def probe_length(self, prompt: Sequence[int]) -> int:
        await self.inflight.acquire()  # clean: near miss, released in finally, the lease below as well
        buf = None
        try:
            buf = self.arena.lease_buffer_nowait()  # clean: near miss, finally looks whether there is one
            if buf is None:
                return -1
            n = 0
            async for tok, _ in self.policy.stream(prompt):
                buf.tokens[n] = tok
                n += 1
            return n
        finally:
            if buf is not None:
                self.arena.end_lease(buf)
            self.inflight.release()

    async def limited(self, prompt_id: int, prompt: Sequence[int]) -> bool:
        await self.inflight.acquire()  # leak: without a free buffer it returns under the semaphore
        buf = self.arena.lease_buffer_nowait()  # clean: ended after use
        if buf is None:
            logger.debug("no buffer for prompt %d", prompt_id)
            return False
        buf.tokens[: len(prompt)] = torch.tensor(prompt)
        self.arena.end_lease(buf)
        self.inflight.release()
        return True


class Learner:
    def __init__(self, arena: ReplayArena, inbox: asyncio.Queue[Trajectory]) -> None:
        self.arena = arena
        self.inbox = inbox
        self.baseline_buf: TrajBuffer | None = None

    async def batches(self, size: int) -> AsyncIterator[torch.Tensor]:
        while True:
            trajs = [await self.inbox.get() for _ in range(size)]
            batch = torch.stack([t.buf.logprobs for t in trajs])
            for t in trajs:
                self.arena.end_lease(t.buf)
            yield batch

    def set_baseline(self, lp: torch.Tensor) -> bool:
        new = self.arena.lease_buffer_nowait()  # leak: the baseline buffer before is overwritten
        if new is None:
            return False
        new.logprobs[: len(lp)] = lp
        self.baseline_buf = new
        return True

    def drop_baseline(self) -> None:
        if self.baseline_buf is not None:
            self.arena.end_lease(self.baseline_buf)
            self.baseline_buf = None

    def collect_spare(self, k: int) -> list[int]:
        spare = []
        for _ in range(k):
            b = self.arena.lease_buffer_nowait()  # leak: with an odd index the loop goes on without it
            if b is None:
                break
            if b.idx & 1:
                continue
            spare.append(b)
        ids = [b.idx for b in spare]
        while spare:
            self.arena.end_lease(spare.pop())
        return ids
