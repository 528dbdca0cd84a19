"""Byte budgets held by upload tasks, prefetch futures and their callbacks."""
from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial


class ByteBudget:
    """An amount of in-flight bytes; take() waits until the amount is there."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._cond = asyncio.Condition()

    async def take(self, amount: int) -> int:
        async with self._cond:
            await self._cond.wait_for(lambda: self._left >= amount)
            self._left -= amount
        return amount

    def give(self, amount: int) -> None:
        self._left += amount
        asyncio.get_running_loop().create_task(self._wake())

    async def _wake(self) -> None:
        async with self._cond:
            self._cond.notify_all()


@dataclass(frozen=True)
class Part:
    key: str
    number: int
    data: bytes


class Uploader:
    def __init__(self, client, budget: ByteBudget) -> None:
        self.client = client
        self.budget = budget
        self._inflight: dict[str, asyncio.Task] = {}
        self._running: dict[str, tuple[asyncio.Task, int]] = {}
        self._held: dict[str, int] = {}

    async def submit(self, part: Part) -> asyncio.Task:
        held = await self.budget.take(len(part.data))  # clean: near miss, the done callback gives it
        task = asyncio.create_task(self.client.put(part.key, part.number, part.data))
        task.add_done_callback(lambda _done: self.budget.give(held))
        return task

    async def submit_all(self, parts: list[Part]) -> list[asyncio.Task]:
        await self.budget.take(sum(len(p.data) for p in parts))  # clean: near miss, given part by part
        tasks = []
        for part in parts:
            task = asyncio.create_task(self.client.put(part.key, part.number, part.data))
            task.add_done_callback(partial(self._part_done, len(part.data)))
            tasks.append(task)
        return tasks

    def _part_done(self, amount: int, _task: asyncio.Task) -> None:
        self.budget.give(amount)

    async def submit_once(self, part: Part) -> asyncio.Task:
        held = await self.budget.take(len(part.data))  # leak: a duplicate returns before a callback owns it
        known = self._inflight.get(part.key)
        if known is not None and not known.done():
            return known
        task = asyncio.create_task(self.client.put(part.key, part.number, part.data))
        task.add_done_callback(lambda _done: self.budget.give(held))
        self._inflight[part.key] = task
        return task

    async def submit_shared(self, part: Part) -> asyncio.Task:
        held = await self.budget.take(len(part.data))  # clean: near miss, given at once for a duplicate
        if (known := self._inflight.get(part.key)) is not None and not known.done():
            self.budget.give(held)
            return known
        task = asyncio.create_task(self.client.put(part.key, part.number, part.data))
        task.add_done_callback(partial(self._part_done, held))
        self._inflight[part.key] = task
        return task

    async def start(self, part: Part) -> None:
        held = await self.budget.take(len(part.data))  # leak: cancel() drops the entry and its amount
        task = asyncio.create_task(self.client.put(part.key, part.number, part.data))
        self._running[part.key] = (task, held)

    def reap(self) -> int:
        done = [key for key, (task, _) in self._running.items() if task.done()]
        for key in done:
            _task, held = self._running.pop(key)
            self.budget.give(held)
        return len(done)

    def cancel(self, key: str) -> bool:
        entry = self._running.pop(key, None)
        if entry is None:
            return False
        task, _held = entry
        return task.cancel()

    async def _attempt(self, part: Part) -> bool:
        self._held[part.key] = await self.budget.take(len(part.data))  # leak: a retry overwrites the amount
        status = await self.client.put(part.key, part.number, part.data)
        return status < 500

    async def upload_with_retry(self, part: Part, attempts: int = 3) -> bool:
        ok = False
        for number in range(attempts):
            ok = await self._attempt(part)
            if ok:
                break
            await asyncio.sleep(0.1 * 2 ** number)
        self._finish(part)
        return ok

    def _finish(self, part: Part) -> None:
        held = self._held.pop(part.key, 0)
        self.budget.give(held)


class Prefetcher:
    def __init__(self, client, budget: ByteBudget, window: int) -> None:
        self.client = client
        self.budget = budget
        self.window = window
        self._ready: dict[str, asyncio.Future] = {}

    async def hint(self, key: str) -> asyncio.Future:
        held = await self.budget.take(self.window)  # leak: drop() cancels and the callback returns early
        future = asyncio.get_running_loop().create_future()
        future.add_done_callback(partial(self._on_ready, key, held))
        self._ready[key] = future
        return future

    def _on_ready(self, key: str, held: int, future: asyncio.Future) -> None:
        if future.cancelled():
            return
        self._ready.pop(key, None)
        self.budget.give(held)

    def drop(self, key: str) -> None:
        future = self._ready.pop(key, None)
        if future is not None:
            future.cancel()


class Mirror:
    """Copies objects; a copy keeps its amount until it ends, one way or another."""

    def __init__(self, client, budget: ByteBudget) -> None:
        self.client = client
        self.budget = budget
        self._copies: dict[str, asyncio.Task] = {}

    async def begin(self, key: str, size: int) -> bool:
        if key in self._copies:
            return False
        held = await self.budget.take(size)  # clean: near miss, _ended() runs for cancelled copies too
        task = asyncio.create_task(self.client.copy(key))
        self._copies[key] = task
        task.add_done_callback(partial(self._ended, key, held))
        return True

    def _ended(self, key: str, held: int, _task: asyncio.Task) -> None:
        self._copies.pop(key, None)
        self.budget.give(held)

    def cancel(self, key: str) -> bool:
        if (task := self._copies.get(key)) is None:
            return False
        return task.cancel()

    async def copy_with_retry(self, key: str, size: int, attempts: int) -> int:
        status = 0
        for _ in range(attempts):
            held = await self.budget.take(size)  # clean: near miss, given before the next attempt starts
            status = await self.client.copy(key)
            self.budget.give(held)
            if status < 500:
                return status
        return status
