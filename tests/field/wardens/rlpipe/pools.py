from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Optional


@dataclass(eq=False)
class Sandbox:
    name: str
    dirty: bool = False
    steps: int = 0

    async def execute(self, action: str) -> str:
        self.dirty = True
        self.steps += 1
        if action == "crash":
            raise TimeoutError(self.name)
        await asyncio.sleep(0)
        return f"{self.name}:{action}"

    async def reset(self) -> None:
        await asyncio.sleep(0)
        self.dirty = False
        self.steps = 0


class SandboxPool:
    def __init__(self, names: list[str]) -> None:
        self._idle: asyncio.Queue[Sandbox] = asyncio.Queue()
        for name in names:
            self._idle.put_nowait(Sandbox(name))

    async def claim(self) -> Sandbox:
        return await self._idle.get()

    def claim_nowait(self) -> Optional[Sandbox]:
        if self._idle.empty():
            return None
        return self._idle.get_nowait()

    def hand_back(self, sandbox: Sandbox) -> None:
        self._idle.put_nowait(sandbox)

    async def claim_clean(self) -> Sandbox:
        sandbox = await self.claim()  # clean: near miss, reset in place and returned to the caller
        if sandbox.dirty:
            await sandbox.reset()
        return sandbox


class TokenBudget:
    def __init__(self, total: int) -> None:
        self.left = total

    def reserve(self, tokens: int) -> bool:
        if tokens > self.left:
            return False
        self.left -= tokens
        return True

    def refund(self, tokens: int) -> None:
        self.left += tokens


@dataclass
class Ticket:
    index: int
    items: list[str] = field(default_factory=list)


class ReplayBuffer:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.samples: list[str] = []
        self.open_tickets: dict[int, Ticket] = {}
        self._count = 0

    def add(self, sample: str) -> None:
        self.samples.append(sample)
        if len(self.samples) > self.capacity and not self.open_tickets:
            del self.samples[0]

    def checkout_batch(self, size: int) -> Optional[Ticket]:
        if len(self.samples) < size:
            return None
        self._count += 1
        ticket = Ticket(self._count, self.samples[-size:])
        self.open_tickets[ticket.index] = ticket
        return ticket

    def settle(self, ticket: Ticket) -> None:
        del self.open_tickets[ticket.index]
