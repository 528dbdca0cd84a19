"""Sandboxed environments are slow to start, so that they are lent again and again."""
from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from typing import AsyncIterator, Awaitable, Callable, Protocol

log = logging.getLogger("rollout.envs")


class ResetFailed(Exception):
    pass


class Env(Protocol):
    born: float

    async def reset(self, task: dict) -> list[int]: ...
    async def step(self, action: list[int]) -> tuple[list[int], float, bool]: ...
    async def shutdown(self) -> None: ...


class EnvPool:
    def __init__(self, factory: Callable[[], Awaitable[Env]], size: int):
        self._factory = factory
        self.size = size
        self._idle: asyncio.Queue[Env] = asyncio.Queue()
        self.resets = 0

    async def start(self) -> None:
        for _ in range(self.size):
            self._idle.put_nowait(await self._factory())  # clean: goes to the idle ones

    async def lend(self, task: dict) -> tuple[Env, list[int]]:
        """A fresh environment and its first observation."""
        env = await self._idle.get()  # clean: near miss, put back when the reset fails, else returned in the tuple
        try:
            observation = await env.reset(task)
        except ResetFailed:
            log.warning("reset failed for task %s", task.get("id"))
            self.reclaim(env)
            raise
        self.resets += 1
        return env, observation

    def reclaim(self, env: Env) -> None:
        self._idle.put_nowait(env)

    @asynccontextmanager
    async def borrowed(self, task: dict) -> AsyncIterator[tuple[Env, list[int]]]:
        env, observation = await self.lend(task)  # clean: reclaimed by the finally
        try:
            yield env, observation
        finally:
            self.reclaim(env)

    async def refresh(self, max_age: float) -> int:
        replaced = 0
        for _ in range(self._idle.qsize()):
            env = self._idle.get_nowait()  # clean: near miss, either it goes back or its successor does
            if time.monotonic() - env.born > max_age:
                await env.shutdown()
                env = await self._factory()  # clean: put to the idle ones below
                replaced += 1
            self._idle.put_nowait(env)
        return replaced
