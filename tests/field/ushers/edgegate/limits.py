from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass
class Grant:
    tenant: str
    tokens: int
    settled: bool = False


class TokenBudget:
    def __init__(self, capacity: dict[str, int]) -> None:
        self._left = dict(capacity)

    def reserve(self, tenant: str, tokens: int) -> Grant | None:
        if self._left.get(tenant, 0) < tokens:
            return None
        self._left[tenant] -= tokens
        return Grant(tenant, tokens)

    def settle(self, grant: Grant) -> None:
        if grant.settled:
            return
        grant.settled = True
        self._left[grant.tenant] += grant.tokens


class Concurrency:
    def __init__(self, limit: int) -> None:
        self._sem = asyncio.Semaphore(limit)

    async def enter(self, timeout: float) -> bool:
        try:
            await asyncio.wait_for(self._sem.acquire(), timeout)
        except asyncio.TimeoutError:
            return False
        return True

    def exit(self) -> None:
        self._sem.release()


class ConcurrencyScope:
    def __init__(self, conc: Concurrency, timeout: float) -> None:
        self._conc = conc
        self._timeout = timeout
        self.entered = False

    async def __aenter__(self) -> bool:
        self.entered = await self._conc.enter(self._timeout)  # clean: near miss, `entered` guards the exit
        return self.entered

    async def __aexit__(self, *exc) -> None:
        if self.entered:
            self._conc.exit()
            self.entered = False
