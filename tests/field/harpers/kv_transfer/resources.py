"""Memory regions, send credits and work slots of the transfer engine."""
from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryRegion:
    rkey: int
    addr: int
    length: int


class RegionTable:
    """Registered memory; the NIC has a bound on the number of regions."""

    def __init__(self, bound: int):
        self.bound = bound
        self._live: dict[int, MemoryRegion] = {}
        self._keys = itertools.count(1)

    def reg_mr(self, addr: int, length: int) -> MemoryRegion | None:
        if len(self._live) >= self.bound:
            return None
        mr = MemoryRegion(next(self._keys), addr, length)
        self._live[mr.rkey] = mr
        return mr

    def dereg_mr(self, mr: MemoryRegion) -> None:
        self._live.pop(mr.rkey, None)


class Credits:
    """Send credits towards one peer."""

    def __init__(self, initial: int):
        self._left = initial
        self._cond = asyncio.Condition()

    async def spend(self, n: int = 1) -> None:
        async with self._cond:
            await self._cond.wait_for(lambda: self._left >= n)
            self._left -= n

    def try_spend(self, n: int = 1) -> bool:
        if self._left < n:
            return False
        self._left -= n
        return True

    async def earn(self, n: int = 1) -> None:
        async with self._cond:
            self._left += n
            self._cond.notify_all()


class WorkQueue:
    """post() takes a slot of the queue, complete() gives it back."""

    def __init__(self, depth: int):
        self._slots = list(range(depth))
        self._pending: dict[int, bytes] = {}

    def post(self, payload: bytes) -> int | None:
        if not self._slots:
            return None
        wr = self._slots.pop()
        self._pending[wr] = payload
        return wr

    def complete(self, wr: int) -> None:
        if self._pending.pop(wr, None) is not None:
            self._slots.append(wr)

    def done(self, wr: int) -> bool:
        return not self._pending[wr]


class RegionCache:
    """Keeps the registrations of ranges that come again."""

    def __init__(self, table: RegionTable, bound: int):
        self.table, self.bound = table, bound
        self._by_range: dict[tuple[int, int], MemoryRegion] = {}

    def region(self, addr: int, length: int) -> MemoryRegion | None:
        key = (addr, length)
        mr = self._by_range.get(key)
        if mr is not None:
            return mr
        if len(self._by_range) >= self.bound:
            oldest = next(iter(self._by_range))
            self.table.dereg_mr(self._by_range.pop(oldest))
        mr = self.table.reg_mr(addr, length)  # clean: near miss, owned by the cache, ended above or in invalidate
        if mr is not None:
            self._by_range[key] = mr
        return mr

    def invalidate(self) -> None:
        for mr in self._by_range.values():
            self.table.dereg_mr(mr)
        self._by_range.clear()


class WideRegionCache:
    """Registers whole pages; the same page may be asked for with several lengths."""

    PAGE = 1 << 21

    def __init__(self, table: RegionTable):
        self.table = table
        self._pages: dict[int, MemoryRegion] = {}

    def region(self, addr: int, length: int) -> MemoryRegion | None:
        page = addr // self.PAGE
        known = self._pages.get(page)
        if known is not None and known.addr + known.length >= addr + length:
            return known
        mr = self.table.reg_mr(page * self.PAGE, addr % self.PAGE + length)  # leak: a longer region replaces the page's shorter one
        if mr is not None:
            self._pages[page] = mr
        return mr

    def close(self) -> None:
        for mr in self._pages.values():
            self.table.dereg_mr(mr)
        self._pages.clear()
