"""Admission control for the generation gateway: token budgets, tenant permits, burst credits."""
from __future__ import annotations

import asyncio
import collections
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import AsyncIterator, Awaitable, Callable, Optional


class Throttled(Exception):
    pass


class TokenBudget:
    """In-flight token counter. ``claim`` is non-blocking and says whether it got the tokens."""

    def __init__(self, ceiling: int):
        self.ceiling = ceiling
        self.inflight = 0
        self._woken = asyncio.Event()

    def claim(self, n: int) -> bool:
        if self.inflight + n > self.ceiling:
            return False
        self.inflight += n
        return True

    async def claim_wait(self, n: int) -> None:
        while self.inflight + n > self.ceiling:
            self._woken.clear()
            await self._woken.wait()
        self.inflight += n

    def refund(self, n: int) -> None:
        self.inflight -= n
        self._woken.set()


class TenantPermits:
    """One semaphore per tenant; permits are objects so double frees can be seen."""

    @dataclass
    class Permit:
        tenant: str
        issued: float = field(default_factory=time.monotonic)
        spent: bool = False

    def __init__(self, per_tenant: int):
        self.per_tenant = per_tenant
        self._sems: dict[str, asyncio.Semaphore] = {}

    def _sem(self, tenant: str) -> asyncio.Semaphore:
        return self._sems.setdefault(tenant, asyncio.Semaphore(self.per_tenant))

    async def enter(self, tenant: str) -> "TenantPermits.Permit":
        await self._sem(tenant).acquire()  # clean: the permit stands for it, leave() releases
        return TenantPermits.Permit(tenant)

    def try_enter(self, tenant: str) -> Optional["TenantPermits.Permit"]:
        if self._sem(tenant).locked():
            return None
        sem = self._sem(tenant)
        sem._value -= 1
        return TenantPermits.Permit(tenant)

    def leave(self, permit: "TenantPermits.Permit") -> None:
        if permit.spent:
            return
        permit.spent = True
        self._sem(permit.tenant).release()

    @asynccontextmanager
    async def inside(self, tenant: str) -> AsyncIterator["TenantPermits.Permit"]:
        permit = await self.enter(tenant)  # clean: left in finally
        try:
            yield permit
        finally:
            self.leave(permit)


@dataclass
class Req:
    tenant: str
    prompt_tokens: int
    max_tokens: int
    priority: int = 0
    permit: Optional[TenantPermits.Permit] = None
    charged: int = 0
    lookahead: int = 0
    cancelled: bool = False


Generate = Callable[[Req], Awaitable[str]]


class Gateway:
    def __init__(self, budget: TokenBudget, permits: TenantPermits, generate: Generate):
        self.budget = budget
        self.permits = permits
        self.generate = generate
        self.waiting: collections.deque[Req] = collections.deque()
        self.live: dict[int, Req] = {}

    async def serve(self, req: Req) -> str:
        need = req.prompt_tokens + req.max_tokens
        async with self.permits.inside(req.tenant):  # clean: async with
            if not self.budget.claim(need):  # clean: refunded in finally, nothing claimed on False
                raise Throttled(req.tenant)
            try:
                return await self.generate(req)
            finally:
                self.budget.refund(need)

    async def serve_fast(self, req: Req) -> Optional[str]:
        permit = self.permits.try_enter(req.tenant)  # leak: kept when the budget refuses
        if permit is None:
            return None
        need = req.prompt_tokens + req.max_tokens
        if not self.budget.claim(need):  # clean: refunded in finally
            return None
        try:
            return await self.generate(req)
        finally:
            self.budget.refund(need)
            self.permits.leave(permit)

    async def serve_metered(self, req: Req) -> str:
        await self.budget.claim_wait(req.prompt_tokens)  # leak: a cancelled request returns before the try
        if req.cancelled:
            return ""
        try:
            return await self.generate(req)
        finally:
            self.budget.refund(req.prompt_tokens)

    def admit(self, req: Req) -> bool:
        req.permit = self.permits.try_enter(req.tenant)  # clean: near miss, sits on req, which finish() settles
        if req.permit is None:
            self.waiting.append(req)
            return False
        need = req.prompt_tokens + req.max_tokens
        if not self.budget.claim(need):  # clean: req.charged is refunded by finish()
            self.permits.leave(req.permit)
            req.permit = None
            self.waiting.append(req)
            return False
        req.charged = need
        self.live[id(req)] = req
        return True

    def finish(self, req: Req) -> None:
        self.live.pop(id(req), None)
        if req.charged:
            self.budget.refund(req.charged)
            req.charged = 0
        if req.lookahead:
            self.budget.refund(req.lookahead)
            req.lookahead = 0
        if req.permit is not None:
            self.permits.leave(req.permit)
            req.permit = None

    def extend(self, req: Req, more: int) -> bool:
        if not self.budget.claim(more):  # clean: near miss, added to req.charged for finish()
            return False
        req.charged += more
        return True

    def set_lookahead(self, req: Req, tokens: int) -> bool:
        if not self.budget.claim(tokens):  # leak: a second call sets req.lookahead anew and the former claim is forgotten
            return False
        req.lookahead = tokens
        return True

    def pump(self) -> int:
        started = 0
        for _ in range(len(self.waiting)):
            req = self.waiting.popleft()
            if req.cancelled:
                continue
            if self.admit(req):  # clean: admitted requests are in live
                started += 1
        return started


class BurstCredits:
    """Wraps a TokenBudget; each burst is charged to the budget as a fixed block."""

    BLOCK = 256

    def __init__(self, budget: TokenBudget):
        self.budget = budget
        self.open = 0

    def draw(self, want: int) -> int:
        got = 0
        while got < want:
            if not self.budget.claim(self.BLOCK):  # clean: near miss, a short draw tells the caller how much it holds
                break
            got += self.BLOCK
        self.open += got
        return got

    def repay(self, amount: int) -> None:
        self.open -= amount
        self.budget.refund(amount)


async def burst_decode(credits: BurstCredits, req: Req, generate: Generate) -> Optional[str]:
    got = credits.draw(req.max_tokens)  # leak: a partial draw is not repaid
    if got < req.max_tokens:
        return None
    try:
        return await generate(req)
    finally:
        credits.repay(got)


async def burst_best_effort(credits: BurstCredits, req: Req, generate: Generate) -> Optional[str]:
    got = credits.draw(req.max_tokens)  # clean: repaid in finally whatever its size
    try:
        if got == 0:
            return None
        req.max_tokens = min(req.max_tokens, got)
        return await generate(req)
    finally:
        credits.repay(got)


async def warm_tenants(permits: TenantPermits, tenants: list[str], probe: Callable[[str], Awaitable[bool]]) -> int:
    warmed = 0
    for tenant in tenants:
        permit = permits.try_enter(tenant)  # leak: continue on a cold probe skips leave()
        if permit is None:
            continue
        if not await probe(tenant):
            continue
        warmed += 1
        permits.leave(permit)
    return warmed
