"""Async rate permits for the completion gateway.

A permit reserves tokens of a tenant's budget before the request goes to the
model. When the reply arrives the permit is settled with the tokens really
used; a request that never ran refunds it.
"""
import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import Optional

logger = logging.getLogger("gateway.permits")


class Throttled(Exception):
    pass


class UpstreamError(Exception):
    pass


@dataclass
class Permit:
    tenant: str
    amount: int
    ledger: "Ledger"
    settled: bool = False

    def settle(self, used: int) -> None:
        if not self.settled:
            self.settled = True
            self.ledger._give(self.tenant, max(0, self.amount - used), held=self.amount)

    def refund(self) -> None:
        self.settle(0)


@dataclass
class Ledger:
    per_tenant: int
    free: dict = field(default_factory=dict)
    held: dict = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def reserve_nowait(self, tenant: str, amount: int) -> Optional[Permit]:
        left = self.free.setdefault(tenant, self.per_tenant)
        if left < amount:
            return None
        self.free[tenant] = left - amount
        self.held[tenant] = self.held.get(tenant, 0) + amount
        return Permit(tenant, amount, self)

    async def reserve(self, tenant: str, amount: int, timeout: float = 10.0) -> Permit:
        deadline = time.monotonic() + timeout
        while True:
            permit = self.reserve_nowait(tenant, amount)  # clean: returned to the caller when it is not None
            if permit is not None:
                return permit
            if time.monotonic() > deadline:
                raise Throttled(tenant)
            await asyncio.sleep(0.05)

    def _give(self, tenant: str, back: int, held: int) -> None:
        self.held[tenant] -= held
        self.free[tenant] += back

    @contextlib.asynccontextmanager
    async def spending(self, tenant: str, amount: int):
        permit = await self.reserve(tenant, amount)  # clean: refunded by the finally unless the body settled it
        try:
            yield permit
        finally:
            permit.refund()


class TieredLedger:
    """Organisation budget on top of the tenant's own one."""

    def __init__(self, org: Ledger, tenant: Ledger):
        self.org = org
        self.tenant = tenant

    def claim(self, org_id: str, tenant: str, amount: int):
        outer = self.org.reserve_nowait(org_id, amount)  # leak: not refunded when the tenant has no budget
        if outer is None:
            return None
        inner = self.tenant.reserve_nowait(tenant, amount)  # clean: returned in the pair
        if inner is None:
            logger.info("tenant %s throttled", tenant)
            return None
        return outer, inner

    def claim_soft(self, org_id: str, tenant: str, amount: int):
        outer = self.org.reserve_nowait(org_id, amount)  # clean: refunded on the failing branch, else returned in the pair
        if outer is None:
            return None
        inner = self.tenant.reserve_nowait(tenant, amount)  # clean: returned in the pair
        if inner is None:
            outer.refund()
            return None
        return outer, inner

    @staticmethod
    def unwind(pair, used: int = 0) -> None:
        outer, inner = pair
        inner.settle(used)
        outer.settle(used)


@dataclass
class Completion:
    text: str
    tokens: int
    finish: str = "stop"


class Gateway:
    def __init__(self, ledger: Ledger, tiers: TieredLedger, upstream):
        self.ledger = ledger
        self.tiers = tiers
        self.upstream = upstream
        self.running: dict[str, Permit] = {}
        self.slots = asyncio.Semaphore(32)

    async def complete(self, tenant: str, prompt: str, budget: int) -> Completion:
        permit = await self.ledger.reserve(tenant, budget)  # clean: settled, or refunded by the handler
        try:
            out = await self.upstream.generate(prompt, budget)
        except UpstreamError:
            permit.refund()
            raise
        permit.settle(out.tokens)
        return out

    async def complete_cached(self, tenant: str, prompt: str, budget: int, cache) -> Completion:
        permit = await self.ledger.reserve(tenant, budget)  # leak: a cache hit returns without settle or refund
        hit = cache.get(prompt)
        if hit is not None:
            return hit
        try:
            out = await self.upstream.generate(prompt, budget)
            cache[prompt] = out
            permit.settle(out.tokens)
        except BaseException:
            permit.refund()
            raise
        return out

    async def stream(self, tenant: str, prompt: str, budget: int):
        used = 0
        async with self.ledger.spending(tenant, budget) as permit:  # clean: async with
            async for piece in self.upstream.stream(prompt):
                used += piece.tokens
                yield piece
                if used >= budget:
                    break
            permit.settle(used)

    async def admit(self, request_id: str, tenant: str, budget: int) -> bool:
        if request_id in self.running:
            return False
        permit = self.ledger.reserve_nowait(tenant, budget)  # clean: near miss, moved into self.running, settled by finish or drain
        if permit is None:
            return False
        self.running[request_id] = permit
        return True

    def finish(self, request_id: str, used: int) -> None:
        permit = self.running.pop(request_id, None)
        if permit is not None:
            permit.settle(used)

    def drain(self) -> None:
        for permit in self.running.values():
            permit.refund()
        self.running.clear()

    async def batch(self, tenant: str, prompts: list[str], budget: int) -> list[Completion]:
        done = []
        for prompt in prompts:
            permit = self.ledger.reserve_nowait(tenant, budget)  # leak: content-filtered replies continue without settling
            if permit is None:
                break
            try:
                out = await self.upstream.generate(prompt, budget)
            except UpstreamError:
                permit.refund()
                continue
            if out.finish == "content_filter":
                logger.warning("filtered for %s", tenant)
                continue
            permit.settle(out.tokens)
            done.append(out)
        return done

    async def org_complete(self, org: str, tenant: str, prompt: str, budget: int):
        pair = self.tiers.claim_soft(org, tenant, budget)  # clean: unwound by the finally
        if pair is None:
            raise Throttled(org)
        used = 0
        try:
            out = await self.upstream.generate(prompt, budget)
            used = out.tokens
            return out
        finally:
            self.tiers.unwind(pair, used)

    async def org_probe(self, org: str, tenant: str) -> bool:
        pair = self.tiers.claim_soft(org, tenant, 1)  # leak: only the outer permit of the pair is refunded
        if pair is None:
            return False
        outer, _ = pair
        outer.refund()
        return True

    async def exclusive(self, coro_fn, idle_only: bool = False):
        await self.slots.acquire()  # leak: slot kept when idle_only finds running requests
        if idle_only and self.running:
            return None
        try:
            return await coro_fn()
        finally:
            self.slots.release()
