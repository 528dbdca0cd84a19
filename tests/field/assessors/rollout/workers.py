from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Optional


@dataclass(eq=False)
class Worker:
    index: int
    version: int = 0
    failures: int = 0

    async def sample(self, prompt: list[int], limit: int) -> list[int]:
        await asyncio.sleep(0)
        return (prompt * limit)[:limit]

    async def load(self, version: int, flat: Any) -> None:
        await asyncio.sleep(0)
        self.version = version


class WorkerPool:
    def __init__(self, n: int) -> None:
        self._idle: asyncio.Queue[Worker] = asyncio.Queue()
        self.size = n
        for i in range(n):
            self._idle.put_nowait(Worker(i))

    async def acquire(self) -> Worker:
        return await self._idle.get()

    def acquire_nowait(self) -> Optional[Worker]:
        try:
            return self._idle.get_nowait()
        except asyncio.QueueEmpty:
            return None

    def acquire_version(self, version: int) -> Optional[Worker]:
        for _ in range(self._idle.qsize()):
            w = self._idle.get_nowait()  # clean: near miss, a worker of another version goes back to the end of the queue
            if w.version == version:
                return w
            self._idle.put_nowait(w)
        return None

    def release(self, w: Worker) -> None:
        self._idle.put_nowait(w)
