"""Token-budget admission for the async front end: permits, per-tenant leases, background tasks."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, Awaitable, Callable, Optional

logger = logging.getLogger(__name__)


class Overloaded(Exception):
    pass


@dataclass
class Lease:
    tenant: str
    tokens: int
    closed: bool = False


class TokenBudget:
    def __init__(self, total: int) -> None:
        self.total = total
        self.in_use = 0
        self._freed = asyncio.Event()

    def try_lease(self, tenant: str, tokens: int) -> Optional[Lease]:
        if self.in_use + tokens > self.total:
            return None
        self.in_use += tokens
        return Lease(tenant, tokens)

    async def lease(self, tenant: str, tokens: int) -> Lease:
        while True:
            got = self.try_lease(tenant, tokens)  # clean: returned as soon as there is one
            if got is not None:
                return got
            self._freed.clear()
            await self._freed.wait()

    def surrender(self, lease: Lease) -> None:
        if lease.closed:
            return
        lease.closed = True
        self.in_use -= lease.tokens
        self._freed.set()


class BudgetScope:
    """async with BudgetScope(budget, tenant, n) as lease: ..."""

    def __init__(self, budget: TokenBudget, tenant: str, tokens: int) -> None:
        self.budget = budget
        self.tenant = tenant
        self.tokens = tokens
        self._lease: Optional[Lease] = None

    async def __aenter__(self) -> Lease:
        self._lease = await self.budget.lease(self.tenant, self.tokens)  # clean: __aexit__ surrenders it
        return self._lease

    async def __aexit__(self, *exc: Any) -> None:
        lease, self._lease = self._lease, None
        if lease is None:
            return
        self.budget.surrender(lease)


Generate = Callable[[str], Awaitable[str]]


class FrontEnd:
    def __init__(self, budget: TokenBudget, generate: Generate, max_batch: int = 4) -> None:
        self.budget = budget
        self.generate = generate
        self.slots = asyncio.Semaphore(max_batch)
        self.leases: dict[str, Lease] = {}
        self._tasks: set["asyncio.Task[str]"] = set()

    async def complete(self, tenant: str, prompt: str) -> str:
        async with BudgetScope(self.budget, tenant, len(prompt)):  # clean: async with
            return await self.generate(prompt)

    async def complete_batched(self, tenant: str, prompt: str) -> Optional[str]:
        await self.slots.acquire()  # leak: the refused lease returns without slots.release()
        lease = self.budget.try_lease(tenant, len(prompt))  # clean: surrendered in the finally
        if lease is None:
            return None
        try:
            return await self.generate(prompt)
        finally:
            self.budget.surrender(lease)
            self.slots.release()

    async def complete_timed(self, tenant: str, prompt: str, seconds: float) -> str:
        lease = await self.budget.lease(tenant, len(prompt))  # leak: the timeout is answered without a surrender
        try:
            out = await asyncio.wait_for(self.generate(prompt), seconds)
        except asyncio.TimeoutError:
            logger.info("%s timed out", tenant)
            return ""
        self.budget.surrender(lease)
        return out

    async def _run(self, lease: Lease, prompt: str) -> str:
        try:
            return await self.generate(prompt)
        finally:
            self.budget.surrender(lease)

    def spawn(self, tenant: str, prompt: str) -> bool:
        lease = self.budget.try_lease(tenant, len(prompt))  # clean: near miss, the task surrenders it
        if lease is None:
            return False
        task = asyncio.ensure_future(self._run(lease, prompt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _run_logged(self, lease: Lease, prompt: str) -> str:
        try:
            out = await self.generate(prompt)
        except Overloaded:
            logger.warning("background request of %s refused", lease.tenant)
            return ""
        self.budget.surrender(lease)
        return out

    def spawn_logged(self, tenant: str, prompt: str) -> bool:
        lease = self.budget.try_lease(tenant, len(prompt))  # leak: the task answers an overload without surrendering it
        if lease is None:
            return False
        task = asyncio.ensure_future(self._run_logged(lease, prompt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def hedge(self, tenant: str, prompt: str) -> str:
        first = await self.budget.lease(tenant, len(prompt))  # clean: surrendered with the second in the gather loop
        leases = [first]
        second = self.budget.try_lease(tenant, len(prompt))  # clean: near miss, in the list when there is one
        if second is not None:
            leases.append(second)
        try:
            outs = await asyncio.gather(*(self.generate(prompt) for _ in leases))
            return min(outs, key=len)
        finally:
            for lease in leases:
                self.budget.surrender(lease)

    async def retry(self, tenant: str, prompt: str, attempts: int) -> str:
        for attempt in range(attempts):
            lease = await self.budget.lease(tenant, len(prompt))  # leak: an Overloaded attempt loops with its lease open
            try:
                out = await self.generate(prompt)
                self.budget.surrender(lease)
                return out
            except Overloaded:
                await asyncio.sleep(0.01 * 2 ** attempt)
        raise Overloaded(tenant)

    async def open_session(self, sid: str, tenant: str, tokens: int) -> bool:
        lease = await self.budget.lease(tenant, tokens)  # leak: a session that is open already returns with the new lease
        if sid in self.leases:
            return False
        self.leases[sid] = lease
        return True

    def extend(self, sid: str, tokens: int) -> bool:
        old = self.leases[sid]
        lease = self.budget.try_lease(old.tenant, old.tokens + tokens)  # clean: takes the old one's place, which is surrendered
        if lease is None:
            return False
        self.leases[sid] = lease
        self.budget.surrender(old)
        return True

    def close_session(self, sid: str) -> None:
        lease = self.leases.pop(sid, None)
        if lease is not None:
            self.budget.surrender(lease)
