"""Asynchronous rollouts for RL: episodes share a handful of inference engines."""
from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import defaultdict, deque
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, AsyncIterator, Awaitable, Callable

log = logging.getLogger(__name__)


class EngineUnavailable(Exception):
    pass


class PolicyStale(Exception):
    pass


class ToolError(Exception):
    pass


class Engine:
    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url
        self.version = 0
        self.healthy = True
        self.failures = 0

    async def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        await asyncio.sleep(0.01 * max_tokens)
        return [random.randrange(32000) for _ in range(max_tokens)]

    async def ping(self) -> bool:
        await asyncio.sleep(0.05)
        return self.failures < 3


class EnginePool:
    def __init__(self, engines: list[Engine], sick_interval: float = 5.0) -> None:
        self._idle: deque[Engine] = deque(engines)
        self._sick: list[Engine] = []
        self._changed = asyncio.Condition()
        self.sick_interval = sick_interval
        self.leased = 0

    async def lease(self, min_version: int = 0) -> Engine:
        async with self._changed:
            await self._changed.wait_for(lambda: self._idle)
            engine = self._idle.popleft()  # leak: an engine that is behind the wanted version raises after the pop
            if engine.version < min_version:
                raise PolicyStale(f"{engine.name} is at {engine.version}, want {min_version}")
            self.leased += 1
            return engine

    def lease_nowait(self) -> Engine:
        while self._idle:
            engine = self._idle.popleft()  # clean: near miss, a sick engine is parked in the list that the doctor brings back
            if not engine.healthy:
                self._sick.append(engine)
                continue
            self.leased += 1
            return engine
        raise EngineUnavailable("all engines are busy or sick")

    async def give_back(self, engine: Engine) -> None:
        async with self._changed:
            self.leased -= 1
            self._idle.append(engine)
            self._changed.notify()

    async def doctor(self) -> None:
        while True:
            await asyncio.sleep(self.sick_interval)
            for engine in list(self._sick):
                if await engine.ping():
                    engine.healthy, engine.failures = True, 0
                    async with self._changed:
                        self._sick.remove(engine)
                        self._idle.append(engine)
                        self._changed.notify()

    @asynccontextmanager
    async def using(self, min_version: int = 0) -> AsyncIterator[Engine]:
        engine = await self.lease(min_version)  # clean: given back in finally
        try:
            yield engine
        finally:
            await self.give_back(engine)


class Episode:
    """Sticks to one engine over its turns, so that the prefix cache stays warm."""

    def __init__(self, eid: int, prompt: list[int], pool: EnginePool) -> None:
        self.eid = eid
        self.tokens = list(prompt)
        self.pool = pool
        self.engine: Engine | None = None
        self.started = time.monotonic()

    async def turn(self, max_tokens: int) -> list[int]:
        if self.engine is None:
            self.engine = await self.pool.lease()  # leak: run_episode() returns after a ToolError without closing the episode
        out = await self.engine.generate(self.tokens, max_tokens)
        self.tokens += out
        return out

    async def close(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            await self.pool.give_back(engine)


async def run_episode(ep: Episode, tool: Callable[[list[int]], Awaitable[list[int]]], turns: int = 4) -> dict[str, Any] | None:
    for i in range(turns):
        action = await ep.turn(64)
        try:
            ep.tokens += await tool(action)
        except ToolError as exc:
            log.warning("episode %d dropped in turn %d: %s", ep.eid, i, exc)
            return None
    await ep.close()
    return {"eid": ep.eid, "tokens": ep.tokens, "seconds": time.monotonic() - ep.started}


class BestOfN:
    def __init__(self, pool: EnginePool, scorer: Callable[[list[int]], float]) -> None:
        self.pool = pool
        self.scorer = scorer
        self._tasks: set[asyncio.Task] = set()
        self.latency: dict[str, list[float]] = defaultdict(list)

    async def _one(self, engine: Engine, prompt: list[int]) -> tuple[float, list[int]]:
        t0 = time.monotonic()
        try:
            out = await engine.generate(prompt, 128)
            return self.scorer(out), out
        finally:
            self.latency[engine.name].append(time.monotonic() - t0)
            await self.pool.give_back(engine)

    async def sample(self, prompt: list[int], n: int) -> list[int]:
        tasks = []
        for _ in range(n):
            engine = await self.pool.lease()  # clean: near miss, the task that gets the engine gives it back in finally
            tasks.append(asyncio.create_task(self._one(engine, prompt)))
        scored = await asyncio.gather(*tasks)
        return max(scored)[1]

    async def fan_out(self, prompt: list[int], n: int) -> list[tuple[float, list[int]]]:
        """Take n engines at once, or none of the work is worth doing."""
        engines: list[Engine] = []
        try:
            for _ in range(n):
                engines.append(self.pool.lease_nowait())  # leak: when a later engine is unavailable, those in the list are not given back
        except EngineUnavailable:
            return []
        return list(await asyncio.gather(*(self._one(e, prompt) for e in engines)))

    async def race(self, prompt: list[int], budget: float) -> list[int] | None:
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(self.pool.using())  # clean: the exit stack unwinds it
            second = await stack.enter_async_context(self.pool.using())  # clean: the exit stack unwinds it
            jobs = [asyncio.create_task(e.generate(prompt, 128)) for e in (first, second)]
            done, late = await asyncio.wait(jobs, timeout=budget, return_when=asyncio.FIRST_COMPLETED)
            for job in late:
                job.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            return done.pop().result() if done else None


class WeightRefresher:
    """Brings engines to a new policy version one after another."""

    def __init__(self, pool: EnginePool, push: Callable[[Engine, int], Awaitable[bool]]) -> None:
        self.pool = pool
        self.push = push
        self.held: dict[str, Engine] = {}

    async def refresh(self, version: int, count: int) -> int:
        updated = 0
        for _ in range(count):
            engine = await self.pool.lease()  # leak: a push that reports failure skips the give-back
            if engine.version >= version:
                await self.pool.give_back(engine)
                continue
            if not await self.push(engine, version):
                engine.failures += 1
                engine.healthy = engine.failures < 3
                continue
            engine.version = version
            updated += 1
            await self.pool.give_back(engine)
        return updated

    async def freeze(self, count: int) -> None:
        while len(self.held) < count:
            engine = await self.pool.lease()  # clean: near miss, kept in self.held until thaw()
            self.held[engine.name] = engine

    async def thaw(self) -> None:
        while self.held:
            _, engine = self.held.popitem()
            await self.pool.give_back(engine)

    async def swap_frozen(self, name: str) -> None:
        engine = await self.pool.lease()  # clean: takes the place of the named engine, which is given back
        old = self.held.pop(name, None)
        self.held[engine.name] = engine
        if old is not None:
            await self.pool.give_back(old)


async def timed_probe(pool: EnginePool, prompt: list[int], limit: float) -> float | None:
    engine = await pool.lease()  # leak: the handler of the timeout returns before the give-back
    t0 = time.monotonic()
    try:
        await asyncio.wait_for(engine.generate(prompt, 8), limit)
    except asyncio.TimeoutError:
        log.error("%s did not answer within %.1fs", engine.name, limit)
        return None
    await pool.give_back(engine)
    return time.monotonic() - t0


async def collect(pool: EnginePool, prompts: list[list[int]], tool, refresher: WeightRefresher) -> list[dict[str, Any]]:
    doctor = asyncio.create_task(pool.doctor())
    try:
        episodes = [Episode(i, p, pool) for i, p in enumerate(prompts)]
        results = await asyncio.gather(*(run_episode(ep, tool) for ep in episodes))
        await refresher.freeze(1)
        try:
            async with pool.using(min_version=0) as engine:  # clean: the context manager gives it back
                await engine.generate([1, 2, 3], 4)
        finally:
            await refresher.thaw()
        return [r for r in results if r is not None]
    finally:
        doctor.cancel()
