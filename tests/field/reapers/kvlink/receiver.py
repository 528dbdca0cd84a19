"""Decode side."""
from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from typing import AsyncIterator, Callable

from .memory import MemoryRegion, OutOfRegions, RegionRegistry

log = logging.getLogger(__name__)


class Landing:
    """A region that is being filled; owned by the receiver until it is handed to the engine."""

    def __init__(self, rid: str, region: MemoryRegion, expected: int) -> None:
        self.rid, self.region, self.expected = rid, region, expected
        self.got = 0
        self.since = time.monotonic()


class Receiver:
    def __init__(self, registry: RegionRegistry, import_kv: Callable, numa: int = 0) -> None:
        self.registry, self.import_kv, self.numa = registry, import_kv, numa
        self.landings: dict[str, Landing] = {}
        self.parked: dict[str, MemoryRegion] = {}
        self._ready: asyncio.Queue[Landing] = asyncio.Queue()

    def offer(self, rid: str, size: int) -> int | None:
        """A sender asks for room; a repeated offer starts the landing over."""
        try:
            region = self.registry.acquire_near(size, self.numa)  # leak: a repeated offer overwrites the landing with its region
        except OutOfRegions:
            return None
        self.landings[rid] = Landing(rid, region, size)
        return region.key

    def on_write(self, rid: str, n: int) -> None:
        landing = self.landings.get(rid)
        if landing is None:
            return
        landing.got += n
        if landing.got >= landing.expected:
            del self.landings[rid]
            self._ready.put_nowait(landing)

    def expire(self, max_age: float) -> int:
        now = time.monotonic()
        old = [l for l in self.landings.values() if now - l.since > max_age]
        for landing in old:
            del self.landings[landing.rid]
            self.registry.release(landing.region)
        return len(old)

    async def pump(self) -> None:
        while True:
            landing = await self._ready.get()  # clean: near miss, either parked for the engine or released in this round
            if not self.import_kv(landing.rid, landing.region):
                self.registry.release(landing.region)
                continue
            previous = self.parked.pop(landing.rid, None)
            self.parked[landing.rid] = landing.region
            if previous is not None:
                self.registry.release(previous)

    def engine_done(self, rid: str) -> None:
        region = self.parked.pop(rid, None)
        if region is not None:
            self.registry.release(region)

    @asynccontextmanager
    async def bounce(self, size: int) -> AsyncIterator[MemoryRegion]:
        region = self.registry.acquire(size)  # clean: released in finally
        try:
            yield region
        finally:
            self.registry.release(region)

    async def pull(self, link, rid: str, size: int) -> bool:
        async with self.bounce(size) as region:  # clean: the context manager releases
            await link.read(rid, region.key, size)
            return bool(self.import_kv(rid, region))

    async def loopback(self, link, size: int) -> float | None:
        try:
            src = self.registry.acquire(size)  # leak: when the second acquire raises the handler returns with the first one held
            dst = self.registry.acquire(size)  # clean: released below
        except OutOfRegions:
            return None
        t0 = time.perf_counter()
        try:
            await link.copy(src.key, dst.key, size)
        finally:
            self.registry.release(src)
            self.registry.release(dst)
        return size / (time.perf_counter() - t0)

    def close(self) -> None:
        self.expire(-1.0)
        for rid in list(self.parked):
            self.engine_done(rid)
        while not self._ready.empty():
            self.registry.release(self._ready.get_nowait().region)
