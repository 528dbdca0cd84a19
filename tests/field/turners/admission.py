"""Admission control: token budget and per-tenant concurrency permits for the API front end."""
from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import AsyncIterator, Awaitable, Callable, Dict, List, Optional

logger = logging.getLogger(__name__)


class EngineBusy(Exception):
    pass


class TokenBudget:
    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0

    def try_charge(self, n: int) -> bool:
        if self.used + n > self.total:
            return False
        self.used += n
        return True

    def refund(self, n: int) -> None:
        self.used -= n


@dataclass(eq=False)
class Permit:
    tenant: str
    index: int


class PermitPool:
    def __init__(self, per_tenant: int) -> None:
        self.per_tenant = per_tenant
        self._out: Dict[str, List[Permit]] = {}
        self._cond = asyncio.Condition()

    async def obtain(self, tenant: str) -> Permit:
        async with self._cond:
            await self._cond.wait_for(lambda: len(self._out.get(tenant, ())) < self.per_tenant)
            return self._grant(tenant)

    def obtain_nowait(self, tenant: str) -> Optional[Permit]:
        if len(self._out.get(tenant, ())) >= self.per_tenant:
            return None
        return self._grant(tenant)

    def _grant(self, tenant: str) -> Permit:
        row = self._out.setdefault(tenant, [])
        permit = Permit(tenant, len(row))
        row.append(permit)
        return permit

    async def surrender(self, permit: Permit) -> None:
        async with self._cond:
            self._out[permit.tenant].remove(permit)
            self._cond.notify_all()

    def outstanding(self) -> int:
        return sum(len(row) for row in self._out.values())


@dataclass
class ApiRequest:
    tenant: str
    prompt_tokens: int
    max_tokens: int = 16
    stream: bool = False
    cancelled: bool = False
    permit: Optional[Permit] = None


Generate = Callable[[ApiRequest], Awaitable[str]]


class FrontEnd:
    def __init__(self, permits: PermitPool, budget: TokenBudget, generate: Generate) -> None:
        self.permits = permits
        self.budget = budget
        self.generate = generate
        self.slots = asyncio.Semaphore(4)
        self._queue: "asyncio.Queue[Optional[ApiRequest]]" = asyncio.Queue()
        self._streams: Dict[int, ApiRequest] = {}

    async def complete(self, req: ApiRequest) -> Optional[str]:
        permit = await self.permits.obtain(req.tenant)  # leak: the handled EngineBusy returns without surrender
        try:
            text = await self.generate(req)
        except EngineBusy:
            logger.warning("engine busy for %s", req.tenant)
            return None
        await self.permits.surrender(permit)
        return text

    async def complete_retry(self, req: ApiRequest, attempts: int = 3) -> Optional[str]:
        for attempt in range(attempts):
            permit = await self.permits.obtain(req.tenant)  # clean: near miss, finally covers return and the next attempt
            try:
                return await self.generate(req)
            except EngineBusy:
                await asyncio.sleep(0)
            finally:
                await self.permits.surrender(permit)
        return None

    async def complete_backoff(self, req: ApiRequest, attempts: int = 3) -> Optional[str]:
        for attempt in range(attempts):
            permit = await self.permits.obtain(req.tenant)  # leak: EngineBusy goes to the next attempt with a further permit
            try:
                text = await self.generate(req)
            except EngineBusy:
                await asyncio.sleep(0)
                continue
            await self.permits.surrender(permit)
            return text
        return None

    async def complete_budgeted(self, req: ApiRequest) -> Optional[str]:
        need = req.prompt_tokens + req.max_tokens
        if not self.budget.try_charge(need):  # leak: a tenant without permit is turned away and the charge stays
            return None
        permit = self.permits.obtain_nowait(req.tenant)  # clean: surrendered in finally
        if permit is None:
            return None
        try:
            return await self.generate(req)
        finally:
            await self.permits.surrender(permit)
            self.budget.refund(need)

    async def complete_capped(self, req: ApiRequest) -> Optional[str]:
        charged = self.budget.try_charge(req.max_tokens)  # clean: near miss, refund under the same flag in finally
        try:
            if not charged and not req.stream:
                return None
            return await self.generate(req)
        finally:
            if charged:
                self.budget.refund(req.max_tokens)

    async def enqueue(self, req: ApiRequest) -> None:
        req.permit = await self.permits.obtain(req.tenant)  # leak: the worker's continue for a cancelled request keeps its permit
        await self._queue.put(req)

    async def worker(self, results: List[str]) -> None:
        while True:
            req = await self._queue.get()
            if req is None:
                return
            if req.cancelled:
                continue
            try:
                results.append(await self.generate(req))
            except EngineBusy:
                logger.info("dropped one of %s", req.tenant)
            await self.permits.surrender(req.permit)
            req.permit = None

    async def throttle(self, req: ApiRequest) -> Optional[str]:
        await self.slots.acquire()  # leak: a cancelled request returns before the semaphore's release
        if req.cancelled:
            return None
        try:
            return await self.generate(req)
        finally:
            self.slots.release()

    async def throttle_deadline(self, req: ApiRequest, timeout: float) -> Optional[str]:
        try:
            await asyncio.wait_for(self.slots.acquire(), timeout)  # clean: near miss, a timeout takes nothing, otherwise finally releases
        except asyncio.TimeoutError:
            return None
        try:
            if req.cancelled:
                return None
            return await self.generate(req)
        finally:
            self.slots.release()

    @asynccontextmanager
    async def permit(self, tenant: str) -> AsyncIterator[Permit]:
        permit = await self.permits.obtain(tenant)  # clean: surrendered in finally
        try:
            yield permit
        finally:
            await self.permits.surrender(permit)

    async def complete_scoped(self, req: ApiRequest) -> Optional[str]:
        async with self.permit(req.tenant):  # clean: async with
            if req.cancelled:
                return None
            return await self.generate(req)

    async def start_stream(self, req: ApiRequest, stream_id: int) -> bool:
        if stream_id in self._streams:
            return False
        req.permit = self.permits.obtain_nowait(req.tenant)  # clean: the request is kept by stream id, end_stream surrenders
        if req.permit is None:
            return False
        self._streams[stream_id] = req
        return True

    async def end_stream(self, stream_id: int) -> None:
        req = self._streams.pop(stream_id, None)
        if req is None or req.permit is None:
            return
        await self.permits.surrender(req.permit)
        req.permit = None

    async def fan_out(self, req: ApiRequest, n: int) -> List[str]:
        async def one(permit: Permit) -> str:
            try:
                return await self.generate(req)
            finally:
                await self.permits.surrender(permit)

        tasks = []
        for _ in range(n):
            permit = self.permits.obtain_nowait(req.tenant)  # clean: near miss, each task surrenders its own
            if permit is None:
                break
            tasks.append(asyncio.create_task(one(permit)))
        return list(await asyncio.gather(*tasks))

    async def best_of(self, req: ApiRequest, n: int) -> Optional[str]:
        held: List[Permit] = []
        while len(held) < n:
            permit = self.permits.obtain_nowait(req.tenant)  # leak: fewer than n permits returns with the list in hand
            if permit is None:
                return None
            held.append(permit)
        texts = [await self.generate(req) for _ in held]
        for permit in held:
            await self.permits.surrender(permit)
        return max(texts, key=len)


async def _main() -> None:
    async def generate(req: ApiRequest) -> str:
        await asyncio.sleep(0)
        return "ok"

    fe = FrontEnd(PermitPool(2), TokenBudget(64), generate)
    req = ApiRequest("t", 4)
    assert await fe.complete_retry(req) == "ok"
    assert await fe.complete_capped(req) == "ok"
    assert await fe.throttle_deadline(req, 1.0) == "ok"
    assert await fe.complete_scoped(req) == "ok"
    assert await fe.start_stream(req, 1)
    await fe.end_stream(1)
    assert await fe.fan_out(req, 3) == ["ok", "ok"]
    assert fe.permits.outstanding() == 0 and fe.budget.used == 0


if __name__ == "__main__":
    asyncio.run(_main())
