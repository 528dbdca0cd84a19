from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import AsyncIterator, Dict, Optional

import torch


class SeqSlots:
    """Rows of the batch state. ``vacancy`` waits, ``vacancy_now`` does not."""

    def __init__(self, n: int, hidden: int):
        self.state = torch.zeros(n, hidden)
        self._open = set(range(n))
        self._cond = asyncio.Condition()

    def vacancy_now(self) -> Optional[int]:
        return self._open.pop() if self._open else None

    async def vacancy(self) -> int:
        async with self._cond:
            await self._cond.wait_for(lambda: bool(self._open))
            return self._open.pop()

    async def vacate(self, row: int) -> None:
        self.state[row].zero_()
        async with self._cond:
            self._open.add(row)
            self._cond.notify()

    @asynccontextmanager
    async def seated(self) -> AsyncIterator[int]:
        row = await self.vacancy()  # clean: vacated in finally
        try:
            yield row
        finally:
            await self.vacate(row)


class AdapterRefs:
    """LoRA adapters in use; an adapter with references is not unloaded."""

    def __init__(self, loaded: Dict[str, torch.Tensor]):
        self.loaded = loaded
        self.users: Dict[str, int] = {}

    def hold(self, name: str) -> Optional[torch.Tensor]:
        w = self.loaded.get(name)
        if w is None:
            return None
        self.users[name] = self.users.get(name, 0) + 1
        return w

    def let_go(self, name: str) -> None:
        self.users[name] -= 1

    def unload_idle(self) -> int:
        idle = [n for n in self.loaded if not self.users.get(n)]
        for n in idle:
            del self.loaded[n]
        return len(idle)
