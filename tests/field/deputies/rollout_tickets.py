"""Rollout workers for RL fine-tuning: generation tickets, sample buffers and weight versions."""
from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Awaitable, Callable

logger = logging.getLogger(__name__)

Generate = Callable[[str, int], Awaitable[list[int]]]
Reward = Callable[[str, list[int]], float]


class EngineBusy(Exception):
    pass


class TicketBooth:
    """At most n generations at a time."""

    def __init__(self, n: int) -> None:
        self._left = n
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> int:
        while self._left == 0:
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            await fut
        self._left -= 1
        return self._left

    def try_enter(self) -> bool:
        if self._left == 0:
            return False
        self._left -= 1
        return True

    def leave(self) -> None:
        self._left += 1
        while self._waiters:
            fut = self._waiters.popleft()
            if not fut.done():
                fut.set_result(None)
                break


class WeightVersions:
    """Versions stay on the device as long as a rollout uses them."""

    def __init__(self) -> None:
        self.current = 0
        self.users: dict[int, int] = {0: 0}

    def acquire(self) -> int:
        self.users[self.current] += 1
        return self.current

    def acquire_exact(self, version: int) -> bool:
        if version not in self.users:
            return False
        self.users[version] += 1
        return True

    def release(self, version: int) -> None:
        self.users[version] -= 1
        if self.users[version] == 0 and version != self.current:
            del self.users[version]

    def publish(self) -> int:
        old = self.current
        self.current += 1
        self.users[self.current] = 0
        if self.users[old] == 0:
            del self.users[old]
        return self.current


class SampleBuffers:
    def __init__(self, n: int, size: int) -> None:
        self._free = [[0] * size for _ in range(n)]
        self.size = size

    def get(self) -> list[int] | None:
        return self._free.pop() if self._free else None

    def put(self, buf: list[int]) -> None:
        self._free.append(buf)


@dataclass
class Sample:
    prompt: str
    length: int
    buf: list[int]
    version: int
    reward: float = 0.0


@dataclass
class Group:
    prompt: str
    samples: list[Sample] = field(default_factory=list)


class RolloutWorker:
    def __init__(self, generate: Generate, reward: Reward, booth: TicketBooth, buffers: SampleBuffers, versions: WeightVersions) -> None:
        self.generate = generate
        self.reward = reward
        self.booth = booth
        self.buffers = buffers
        self.versions = versions
        self.ready: asyncio.Queue[Group] = asyncio.Queue()

    def _discard(self, group: Group) -> None:
        for s in group.samples:
            self.buffers.put(s.buf)
            self.versions.release(s.version)
        group.samples.clear()

    async def _tokens(self, prompt: str, version: int) -> list[int]:
        await self.booth.enter()  # clean: left in the finally
        try:
            return await self.generate(prompt, version)
        finally:
            self.booth.leave()

    async def _one(self, prompt: str) -> Sample | None:
        version = self.versions.acquire()  # leak: not released when no buffer is to be had
        buf = self.buffers.get()  # clean: near miss, put back when the engine is busy, else moved into the sample
        if buf is None:
            return None
        try:
            tokens = await self._tokens(prompt, version)
        except EngineBusy:
            self.buffers.put(buf)
            self.versions.release(version)
            return None
        n = min(len(tokens), self.buffers.size)
        buf[:n] = tokens[:n]
        return Sample(prompt, n, buf, version)

    async def rollout_group(self, prompt: str, k: int) -> bool:
        group = Group(prompt)
        for _ in range(k):
            sample = await self._one(prompt)  # clean: near miss, an incomplete group is discarded with all its samples, a whole one is queued
            if sample is None:
                self._discard(group)
                return False
            sample.reward = self.reward(prompt, sample.buf[: sample.length])
            group.samples.append(sample)
        await self.ready.put(group)
        return True

    async def rollout_filtered(self, prompt: str, k: int, floor: float) -> None:
        group = Group(prompt)
        for _ in range(k):
            sample = await self._one(prompt)  # leak: one under the floor is skipped with its buffer and version
            if sample is None:
                continue
            sample.reward = self.reward(prompt, sample.buf[: sample.length])
            if sample.reward < floor:
                continue
            group.samples.append(sample)
        await self.ready.put(group)

    async def best_of(self, prompt: str, k: int) -> Sample | None:
        best: Sample | None = None
        for _ in range(k):
            sample = await self._one(prompt)  # leak: a better one replaces best, and neither the beaten nor the losing sample is discarded
            if sample is None:
                continue
            sample.reward = self.reward(prompt, sample.buf[: sample.length])
            if best is None or sample.reward > best.reward:
                best = sample
        return best

    async def best_answer(self, prompt: str, k: int) -> list[int]:
        best = await self.best_of(prompt, k)  # clean: near miss, buffer and version go back once the tokens are copied
        if best is None:
            return []
        out = best.buf[: best.length]
        self._discard(Group(prompt, [best]))
        return out

    async def replay(self, prompt: str, version: int) -> list[int] | None:
        """Generate again with old weights, for the off-policy correction."""
        if not self.versions.acquire_exact(version):  # leak: with no ticket left None is returned and the version kept in use
            return None
        if not self.booth.try_enter():  # clean: left in the finally
            return None
        try:
            return await self.generate(prompt, version)
        finally:
            self.booth.leave()
            self.versions.release(version)

    async def warmup(self, prompts: list[str]) -> int:
        done = 0
        for p in prompts:
            if not self.booth.try_enter():  # leak: a busy engine goes on with the next prompt without leaving
                break
            try:
                await self.generate(p, self.versions.current)
            except EngineBusy:
                logger.info("busy during warmup")
                continue
            self.booth.leave()
            done += 1
        return done

    async def generate_patiently(self, prompt: str, attempts: int) -> list[int] | None:
        for i in range(attempts):
            if self.booth.try_enter():  # clean: near miss, left in the finally in every round in which it was entered
                try:
                    return await self.generate(prompt, self.versions.current)
                except EngineBusy:
                    logger.info("attempt %d refused", i)
                finally:
                    self.booth.leave()
            await asyncio.sleep(random.random() * 0.1)
        return None


class Trainer:
    def __init__(self, worker: RolloutWorker) -> None:
        self.worker = worker

    async def step(self, max_staleness: int) -> float:
        group = await self.worker.ready.get()  # clean: near miss, discarded whether stale or used
        try:
            fresh = [s for s in group.samples if self.worker.versions.current - s.version <= max_staleness]
            if not fresh:
                return 0.0
            return sum(s.reward for s in fresh) / len(fresh)
        finally:
            self.worker._discard(group)

    async def drain_lengths(self) -> list[int]:
        out: list[int] = []
        while not self.worker.ready.empty():
            group = self.worker.ready.get_nowait()  # leak: the lengths are read and the samples dropped with their buffers and versions
            out.extend(s.length for s in group.samples)
        return out
