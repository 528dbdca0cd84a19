"""Admission: token budget and per-tenant concurrency."""
from __future__ import annotations

import asyncio
from collections import defaultdict


class TokenBudget:
    def __init__(self, total: int) -> None:
        self.left = total

    def charge(self, n: int) -> bool:
        if n > self.left:
            return False
        self.left -= n
        return True

    def refund(self, n: int) -> None:
        self.left += n


class TenantLimiter:
    def __init__(self, per_tenant: int, budget: TokenBudget) -> None:
        self.budget = budget
        self._sems: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(per_tenant))

    async def enter(self, tenant: str, tokens: int) -> bool:
        sem = self._sems[tenant]
        await sem.acquire()  # clean: near miss, released when the budget says no, else by leave
        if not self.budget.charge(tokens):  # clean: refunded by leave
            sem.release()
            return False
        return True

    def leave(self, tenant: str, tokens: int) -> None:
        self.budget.refund(tokens)
        self._sems[tenant].release()

    async def enter_fast(self, tenant: str, tokens: int) -> bool:
        """Like enter, but never waits for the tenant's turn."""
        if not self.budget.charge(tokens):  # leak: not refunded when the tenant's semaphore is taken
            return False
        sem = self._sems[tenant]
        if sem.locked():
            return False
        await sem.acquire()  # clean: released by leave
        return True
