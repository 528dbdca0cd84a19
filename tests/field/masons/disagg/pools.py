from __future__ import annotations

import asyncio
from typing import Dict, List, Optional


class MetadataSlots:
    def __init__(self, n: int) -> None:
        self._free = list(range(n))
        self.rows: Dict[int, bytes] = {}

    def alloc(self) -> Optional[int]:
        return self._free.pop() if self._free else None

    def free(self, idx: int) -> None:
        self.rows.pop(idx, None)
        self._free.append(idx)


class KVRows:
    def __init__(self, n: int) -> None:
        self.left = n

    def reserve(self, n: int) -> bool:
        if n > self.left:
            return False
        self.left -= n
        return True

    def unreserve(self, n: int) -> None:
        self.left += n


class Instances:
    """Load counters of prefill or decode instances."""

    def __init__(self, urls: List[str]) -> None:
        self.load: Dict[str, int] = {u: 0 for u in urls}

    def pick(self) -> str:
        url = min(self.load, key=lambda u: self.load[u])
        self.load[url] += 1
        return url

    def unpick(self, url: str) -> None:
        self.load[url] -= 1


class InflightGate:
    def __init__(self, n: int) -> None:
        self._sem = asyncio.Semaphore(n)

    async def enter(self) -> None:
        await self._sem.acquire()  # clean: leave() is the other half

    def leave(self) -> None:
        self._sem.release()
