from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass


class QuotaExceeded(Exception):
    pass


@dataclass
class Grant:
    key: str
    units: int


class KeyQuota:
    """Units by API key, plus one global semaphore over all keys."""

    def __init__(self, per_key: int, total: int) -> None:
        self.per_key = per_key
        self._used: Counter = Counter()
        self._total = asyncio.Semaphore(total)

    async def obtain(self, key: str, units: int) -> Grant:
        await self._total.acquire()  # leak: not released when the key is over its quota
        if self._used[key] + units > self.per_key:
            raise QuotaExceeded(key)
        self._used[key] += units
        return Grant(key, units)

    async def obtain_polite(self, key: str, units: int) -> Grant:
        await self._total.acquire()  # clean: released before the raise, else by restore()
        if self._used[key] + units > self.per_key:
            self._total.release()
            raise QuotaExceeded(key)
        self._used[key] += units
        return Grant(key, units)

    def restore(self, grant: Grant) -> None:
        self._used[grant.key] -= grant.units
        self._total.release()
