"""Decode side: lands the blocks in registered memory."""
from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Iterator

from .resources import Credits, MemoryRegion, RegionCache, RegionTable

log = logging.getLogger(__name__)


@dataclass
class Landing:
    rid: str
    mr: MemoryRegion
    expected: int
    received: int = 0


class KVReceiver:
    def __init__(self, table: RegionTable, credits: Credits):
        self.table, self.credits = table, credits
        self.landings: dict[str, Landing] = {}

    def prepare(self, rid: str, addr: int, length: int, blocks: int) -> int | None:
        mr = self.table.reg_mr(addr, length)  # leak: expire pops the landing and keeps its region
        if mr is None:
            return None
        self.landings[rid] = Landing(rid, mr, blocks)
        return mr.rkey

    def on_block(self, rid: str) -> bool:
        landing = self.landings.get(rid)
        if landing is None:
            return False
        landing.received += 1
        if landing.received < landing.expected:
            return False
        del self.landings[rid]
        self.table.dereg_mr(landing.mr)
        return True

    def expire(self, rids: list[str]) -> int:
        gone = 0
        for rid in rids:
            if self.landings.pop(rid, None) is not None:
                gone += 1
        log.info("%d landings expired", gone)
        return gone


class PullReceiver:
    """Pulls the blocks itself, some at a time."""

    def __init__(self, table: RegionTable, credits: Credits, width: int):
        self.table, self.credits, self.width = table, credits, width
        self.cache = RegionCache(table, bound=8)

    async def _pull_one(self, block: int) -> int:
        await self.credits.spend()  # clean: earned back in the finally
        try:
            await asyncio.sleep(0)
            return block
        finally:
            await self.credits.earn()

    async def pull(self, addr: int, length: int, blocks: list[int]) -> list[int]:
        mr = self.table.reg_mr(addr, length)  # clean: deregistered when all the blocks are here
        if mr is None:
            return []
        got: list[int] = []
        for at in range(0, len(blocks), self.width):
            got += await asyncio.gather(*(self._pull_one(b) for b in blocks[at:at + self.width]))
        self.table.dereg_mr(mr)
        return got

    async def pull_counted(self, blocks: list[int], limit: int) -> int:
        """Pulls at most limit blocks with one bulk of credits."""
        await self.credits.spend(limit)  # leak: only the credits of blocks pulled are earned back
        pulled = 0
        for _ in blocks[:limit]:
            await asyncio.sleep(0)
            pulled += 1
        await self.credits.earn(pulled)
        return pulled

    async def pull_bulk(self, blocks: list[int]) -> int:
        n = min(len(blocks), self.width)
        await self.credits.spend(n)  # clean: near miss, earned back in two parts
        half = n // 2
        await asyncio.sleep(0)
        await self.credits.earn(half)
        await asyncio.sleep(0)
        await self.credits.earn(n - half)
        return n

    def close(self) -> None:
        self.cache.invalidate()


@contextmanager
def landing_zone(table: RegionTable, addr: int, length: int) -> Iterator[MemoryRegion | None]:
    mr = table.reg_mr(addr, length)  # clean: deregistered when the block ends
    try:
        yield mr
    finally:
        if mr is not None:
            table.dereg_mr(mr)


async def receive_small(table: RegionTable, addr: int, frames: asyncio.Queue) -> int:
    with landing_zone(table, addr, 1 << 16) as mr:  # clean: the manager deregisters
        if mr is None:
            return 0
        total = 0
        while (frame := await frames.get()) is not None:
            total += len(frame)
        return total


def reserve_pair(table: RegionTable, k_addr: int, v_addr: int, length: int) -> tuple[MemoryRegion, MemoryRegion] | None:
    keys = table.reg_mr(k_addr, length)  # leak: kept when there is no region for the values
    values = table.reg_mr(v_addr, length)  # clean: deregistered when there is none for the keys, else returned
    if keys is None:
        if values is not None:
            table.dereg_mr(values)
        return None
    if values is None:
        return None
    return keys, values
