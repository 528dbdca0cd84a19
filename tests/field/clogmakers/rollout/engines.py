from __future__ import annotations

import asyncio
import logging
from typing import List

logger = logging.getLogger(__name__)


class NoEngine(RuntimeError):
    """Nothing idle within the time the caller wanted to wait."""


class SyncFailed(RuntimeError):
    """An engine could not load the weights of the current version."""


class EngineLease:
    def __init__(self, pool: "EnginePool", engine) -> None:
        self._pool = pool
        self.engine = engine
        self.tokens = 0

    async def generate(self, messages, **sampling):
        out = await self.engine.generate(messages, version=self._pool.version, **sampling)
        self.tokens += len(out.token_ids)
        return out

    def release(self) -> None:
        if self.engine is not None:
            engine, self.engine = self.engine, None
            self._pool._put(engine)

    async def __aenter__(self) -> "EngineLease":
        return self

    async def __aexit__(self, *exc) -> None:
        self.release()


class EnginePool:
    def __init__(self, engines: List) -> None:
        self._idle: asyncio.Queue = asyncio.Queue()
        for e in engines:
            self._idle.put_nowait(e)
        self.size = len(engines)
        self.version = 0
        self.synced = 0

    async def acquire(self, patience: float = 60.0) -> EngineLease:
        try:
            engine = await asyncio.wait_for(self._idle.get(), patience)  # leak: an engine whose load() fails is dropped when SyncFailed is raised
        except asyncio.TimeoutError:
            raise NoEngine(f"none of {self.size} engines idle after {patience:.0f} s") from None
        if engine.version != self.version:
            if not await engine.load(self.version):
                raise SyncFailed(f"{engine.name} stays at version {engine.version}")
            self.synced += 1
        return EngineLease(self, engine)

    def acquire_nowait(self) -> EngineLease | None:
        try:
            engine = self._idle.get_nowait()  # clean: near miss, put back when it is behind, else part of the lease
        except asyncio.QueueEmpty:
            return None
        if engine.version != self.version:
            self._put(engine)
            return None
        return EngineLease(self, engine)

    def _put(self, engine) -> None:
        self._idle.put_nowait(engine)

    async def publish(self, version: int) -> int:
        """All engines are taken before any of them loads, so that no group mixes versions."""
        taken = []
        ok = 0
        try:
            for _ in range(self.size):
                taken.append(await self._idle.get())  # clean: the list is put back in finally
            self.version = version
            for engine in taken:
                if await engine.load(version):
                    ok += 1
                else:
                    logger.error("%s did not load version %d", engine.name, version)
        finally:
            for engine in taken:
                self._put(engine)
        return ok
