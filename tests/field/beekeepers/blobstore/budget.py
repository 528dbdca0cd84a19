"""Memory budget and part buffers of the upload path."""
from __future__ import annotations

import asyncio
from collections import deque
from typing import Optional


class Grant:
    __slots__ = ("amount", "open")

    def __init__(self, amount: int) -> None:
        self.amount = amount
        self.open = True


class MemoryBudget:
    """Bytes promised to requests. A grant is repaid once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._turn = asyncio.Condition()

    def request(self, amount: int) -> Optional[Grant]:
        if self.used + amount > self.limit:
            return None
        self.used += amount
        return Grant(amount)

    async def wait_for(self, amount: int) -> Grant:
        async with self._turn:
            await self._turn.wait_for(lambda: self.used + amount <= self.limit)
            self.used += amount
        return Grant(amount)

    def repay(self, grant: Grant) -> None:
        if grant.open:
            grant.open = False
            self.used -= grant.amount

    async def notify(self) -> None:
        async with self._turn:
            self._turn.notify_all()


class PartBuffer:
    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.fill = 0
        self.number = 0


class PartArena:
    """Free list of part buffers; every buffer outside costs a grant of the budget."""

    def __init__(self, budget: MemoryBudget, size: int) -> None:
        self.budget = budget
        self.size = size
        self._spare: deque[PartBuffer] = deque(maxlen=32)
        self._grants: dict[int, Grant] = {}

    def lend(self) -> Optional[PartBuffer]:
        grant = self.budget.request(self.size)  # clean: near miss, filed, restore() repays it
        if grant is None:
            return None
        buffer = self._spare.popleft() if self._spare else PartBuffer(self.size)
        self._grants[id(buffer)] = grant
        return buffer

    async def lend_wait(self) -> PartBuffer:
        grant = await self.budget.wait_for(self.size)  # clean: near miss, filed, restore() repays it
        buffer = self._spare.popleft() if self._spare else PartBuffer(self.size)
        self._grants[id(buffer)] = grant
        return buffer

    def restore(self, buffer: PartBuffer) -> None:
        grant = self._grants.pop(id(buffer))
        self.budget.repay(grant)
        buffer.fill = 0
        self._spare.append(buffer)
