"""Per-tenant admission for the completion API (asyncio)."""
from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import AsyncIterator, Awaitable, Callable


class TokenBudget:
    """Amounts of prompt tokens in flight per tenant."""

    def __init__(self, per_tenant: int) -> None:
        self.per_tenant = per_tenant
        self._inflight: dict[str, int] = {}

    def charge(self, tenant: str, n: int) -> int:
        """Returns the charged amount, 0 if the tenant has no room."""
        used = self._inflight.get(tenant, 0)
        if used + n > self.per_tenant:
            return 0
        self._inflight[tenant] = used + n  # clean: amount handed to the caller
        return n

    def credit(self, tenant: str, n: int) -> None:
        left = self._inflight.get(tenant, 0) - n
        if left > 0:
            self._inflight[tenant] = left
        else:
            self._inflight.pop(tenant, None)


@dataclass
class Completion:
    tenant: str
    prompt: list[int]
    charged: int = 0
    started: float = 0.0
    tokens: list[int] = field(default_factory=list)
    cancelled: bool = False


class CompletionService:
    def __init__(self, budget: TokenBudget, engine: Callable[[Completion], AsyncIterator[int]], width: int = 32) -> None:
        self.budget = budget
        self.engine = engine
        self.sem = asyncio.Semaphore(width)
        self.write_lock = asyncio.Lock()
        self.live: dict[int, Completion] = {}
        self.usage: dict[str, int] = {}
        self.tasks: set[asyncio.Task] = set()

    async def _record(self, req: Completion) -> None:
        async with self.write_lock:  # clean: async with
            self.usage[req.tenant] = self.usage.get(req.tenant, 0) + len(req.tokens)

    async def complete(self, req: Completion) -> list[int]:
        async with self.sem:  # clean: async with covers all returns
            got = self.budget.charge(req.tenant, len(req.prompt))  # clean: near miss, 0 on refusal, otherwise credited in finally
            if not got:
                return []
            try:
                async for tok in self.engine(req):
                    req.tokens.append(tok)
                return req.tokens
            finally:
                self.budget.credit(req.tenant, got)

    async def complete_quick(self, req: Completion, max_wait: float) -> list[int] | None:
        try:
            await asyncio.wait_for(self.sem.acquire(), max_wait)  # leak: the refused charge below returns without releasing
        except asyncio.TimeoutError:
            return None
        got = self.budget.charge(req.tenant, len(req.prompt))  # clean: credited after the engine loop
        if not got:
            return None
        async for tok in self.engine(req):
            req.tokens.append(tok)
        self.budget.credit(req.tenant, got)
        self.sem.release()
        return req.tokens

    async def enqueue(self, req: Completion) -> asyncio.Task:
        await self.sem.acquire()  # clean: near miss, the task releases in its finally
        task = asyncio.create_task(self._run(req))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _run(self, req: Completion) -> None:
        try:
            req.started = time.monotonic()
            async for tok in self.engine(req):
                if req.cancelled:
                    return
                req.tokens.append(tok)
            await self._record(req)
        finally:
            self.sem.release()

    def open(self, rid: int, req: Completion) -> bool:
        if rid in self.live or req.charged:
            return False
        req.charged = self.budget.charge(req.tenant, len(req.prompt))  # clean: held in req.charged, close() credits it
        if req.charged:
            self.live[rid] = req
        return bool(req.charged)

    def extend(self, rid: int, more: list[int]) -> bool:
        req = self.live[rid]
        extra = self.budget.charge(req.tenant, len(more))  # clean: near miss, added to req.charged
        if not extra:
            return False
        req.prompt.extend(more)
        req.charged += extra
        return True

    def replace_prompt(self, rid: int, prompt: list[int]) -> bool:
        req = self.live[rid]
        req.prompt = prompt
        req.charged = self.budget.charge(req.tenant, len(prompt))  # leak: overwrites the amount still charged for the old prompt
        return req.charged > 0

    def close(self, rid: int) -> None:
        req = self.live.pop(rid, None)
        if req is not None:
            self.budget.credit(req.tenant, req.charged)
            req.charged = 0

    async def set_usage(self, tenant: str, value: int) -> bool:
        await self.write_lock.acquire()  # leak: unchanged value returns with the lock held
        if self.usage.get(tenant) == value:
            return False
        self.usage[tenant] = value
        self.write_lock.release()
        return True

    async def fan_out(self, reqs: list[Completion], fn: Callable[[Completion], Awaitable[bool]]) -> int:
        ok = 0
        for req in reqs:
            got = self.budget.charge(req.tenant, len(req.prompt))  # leak: only accepted requests are credited
            if not got:
                continue
            if await fn(req):
                ok += 1
                self.budget.credit(req.tenant, got)
        return ok
