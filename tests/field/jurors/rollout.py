"""Asynchronous rollout collection for PPO/GRPO training."""
from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Optional


class WorkerDied(RuntimeError):
    pass


@dataclass(eq=False)
class Worker:
    index: int
    version: int = 0
    alive: bool = True

    async def generate(self, prompt: str, max_tokens: int) -> str:
        await asyncio.sleep(0)
        if not self.alive:
            raise WorkerDied(self.index)
        return prompt[:max_tokens]


class WorkerPool:
    def __init__(self, workers: list[Worker]) -> None:
        self._idle: asyncio.Queue[Worker] = asyncio.Queue()
        for worker in workers:
            self._idle.put_nowait(worker)

    async def lease(self) -> Worker:
        return await self._idle.get()

    def lease_nowait(self) -> Optional[Worker]:
        return None if self._idle.empty() else self._idle.get_nowait()

    def give(self, worker: Worker) -> None:
        self._idle.put_nowait(worker)


class WeightVersions:
    """A version stays in memory while somebody holds it."""

    def __init__(self) -> None:
        self._holds: Counter[int] = Counter()

    def hold(self, version: int) -> int:
        self._holds[version] += 1
        return version

    def drop(self, version: int) -> None:
        self._holds[version] -= 1
        if not self._holds[version]:
            del self._holds[version]


@dataclass(eq=False)
class Started:
    prompt: str
    worker: Worker
    task: asyncio.Task[str]
    version: int


@dataclass
class Collector:
    pool: WorkerPool
    versions: WeightVersions
    max_tokens: int = 256
    current: int = 0
    staged: list[int] = field(default_factory=list)
    out: list[tuple[str, str]] = field(default_factory=list)
    started: asyncio.Queue[Started] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.versions.hold(self.current)  # clean: near miss, the collector holds its current version, dropped by publish() and shutdown()

    async def one(self, prompt: str) -> str:
        worker = await self.pool.lease()  # clean: near miss, cancellation gives the worker back before it is raised again
        try:
            text = await worker.generate(prompt, self.max_tokens)
        except (asyncio.CancelledError, WorkerDied):
            self.pool.give(worker)
            raise
        self.pool.give(worker)
        return text

    async def one_with_timeout(self, prompt: str, seconds: float) -> Optional[str]:
        worker = await self.pool.lease()  # leak: the timeout is turned into None and the worker stays leased
        try:
            text = await asyncio.wait_for(worker.generate(prompt, self.max_tokens), seconds)
        except asyncio.TimeoutError:
            return None
        except WorkerDied:
            self.pool.give(worker)
            return None
        self.pool.give(worker)
        return text

    async def retry(self, prompt: str, attempts: int = 3) -> Optional[str]:
        for attempt in range(attempts):
            worker = await self.pool.lease()  # leak: a dead worker goes round by continue and is not given back
            try:
                text = await worker.generate(prompt, self.max_tokens)
            except WorkerDied:
                await asyncio.sleep(0.1 * (attempt + 1))
                continue
            self.pool.give(worker)
            return text
        return None

    async def retry_same(self, prompt: str, attempts: int = 3) -> Optional[str]:
        worker = await self.pool.lease()  # clean: near miss, continue keeps this one worker and finally gives it back
        try:
            for _ in range(attempts):
                try:
                    return await worker.generate(prompt, self.max_tokens)
                except WorkerDied:
                    worker.alive = True
                    continue
            return None
        finally:
            self.pool.give(worker)

    async def group(self, prompt: str, n: int) -> list[str]:
        workers: list[Worker] = []
        for _ in range(n):
            worker = self.pool.lease_nowait()  # leak: with too few idle workers those in the list are dropped by return
            if worker is None:
                return []
            workers.append(worker)
        try:
            return list(await asyncio.gather(*(w.generate(prompt, self.max_tokens) for w in workers)))
        finally:
            for worker in workers:
                self.pool.give(worker)

    async def group_up_to(self, prompt: str, n: int) -> list[str]:
        workers: list[Worker] = []
        while len(workers) < n:
            worker = self.pool.lease_nowait()  # clean: near miss, None only ends the loop and all leased ones are given back
            if worker is None:
                break
            workers.append(worker)
        try:
            return list(await asyncio.gather(*(w.generate(prompt, self.max_tokens) for w in workers)))
        finally:
            for worker in workers:
                self.pool.give(worker)

    async def start(self, prompt: str) -> None:
        worker = await self.pool.lease()  # clean: near miss, queued in Started, and drain() gives every worker back
        version = self.versions.hold(self.current)  # leak: drain() skips a stale result by continue without dropping its version
        task = asyncio.create_task(worker.generate(prompt, self.max_tokens))
        await self.started.put(Started(prompt, worker, task, version))

    async def drain(self, max_lag: int) -> int:
        kept = 0
        while not self.started.empty():
            item = self.started.get_nowait()
            try:
                text = await item.task
            except WorkerDied:
                text = ""
            self.pool.give(item.worker)
            if self.current - item.version > max_lag:
                continue
            self.versions.drop(item.version)
            if text:
                self.out.append((item.prompt, text))
                kept += 1
        return kept

    def publish(self, version: int) -> None:
        self.versions.hold(version)  # clean: near miss, becomes current, and the version before is dropped here
        self.versions.drop(self.current)
        self.current = version

    def rollback(self, version: int) -> None:
        self.current = self.versions.hold(version)  # leak: current is overwritten without dropping the version it held

    def stage(self, version: int) -> None:
        if version in self.staged:
            return
        self.versions.hold(version)  # clean: near miss, listed in staged, and promote() and shutdown() drop it
        self.staged.append(version)

    def promote(self) -> None:
        while self.staged:
            version = self.staged.pop()
            self.publish(version)
            self.versions.drop(version)

    async def shutdown(self) -> None:
        await self.drain(max_lag=0)
        for version in self.staged:
            self.versions.drop(version)
        self.staged.clear()
        self.versions.drop(self.current)
