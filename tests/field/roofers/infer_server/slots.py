from __future__ import annotations

import asyncio
from collections import deque
from typing import Optional


class SlotManager:
    """Rows of the batch; each holds the KV of one sequence."""

    def __init__(self, n: int) -> None:
        self._free: deque[int] = deque(range(n))
        self._waiters: deque[asyncio.Future] = deque()

    async def lease(self) -> int:
        while not self._free:
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            await fut
        return self._free.popleft()

    def try_lease(self) -> Optional[int]:
        return self._free.popleft() if self._free else None

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
        while self._waiters:
            fut = self._waiters.popleft()
            if not fut.done():
                fut.set_result(None)
                break

    def idle(self) -> int:
        return len(self._free)
