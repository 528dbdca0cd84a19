from __future__ import annotations

import asyncio
from typing import Callable, Optional

from .weights import WeightSync
from .workers import Worker, WorkerPool


class RolloutDriver:
    def __init__(self, pool: WorkerPool, sync: WeightSync, reward: Callable[[list[int]], float]) -> None:
        self.pool = pool
        self.sync = sync
        self.reward = reward
        self._sticky: dict[str, Worker] = {}

    async def one(self, prompt: list[int], limit: int) -> Optional[list[int]]:
        w = await self.pool.acquire()  # leak: the handler of a failed sample counts the failure and returns without release
        try:
            out = await w.sample(prompt, limit)
        except ConnectionError:
            w.failures += 1
            return None
        self.pool.release(w)
        return out

    async def group(self, prompts: list[list[int]], limit: int) -> list[list[int]]:
        outs: list[list[int]] = []
        for prompt in prompts:
            w = await self.pool.acquire()  # clean: near miss, continue and failure both run through finally
            try:
                out = await w.sample(prompt, limit)
                if not out:
                    continue
                outs.append(out)
            except ConnectionError:
                w.failures += 1
            finally:
                self.pool.release(w)
        return outs

    async def on_policy(self, prompt: list[int], limit: int) -> Optional[float]:
        w = self.pool.acquire_version(self.sync.version)  # clean: near miss, with no worker of the version another is taken instead
        if w is None:
            w = await self.pool.acquire()  # clean: only taken when there was none, released in finally
        try:
            return self.reward(await w.sample(prompt, limit))
        finally:
            self.pool.release(w)

    async def chat(self, sid: str, prompt: list[int]) -> list[int]:
        w = self._sticky.get(sid)
        if w is None:
            w = self._sticky[sid] = await self.pool.acquire()  # clean: near miss, the sticky table owns it until end_chat
        return await w.sample(prompt, 64)

    def end_chat(self, sid: str) -> None:
        w = self._sticky.pop(sid, None)
        if w is not None:
            self.pool.release(w)

    async def migrate(self, sid: str) -> bool:
        old = self._sticky.get(sid)
        if old is None:
            return False
        self._sticky[sid] = await self.pool.acquire()  # leak: the former worker of the chat is replaced and not released
        return True
