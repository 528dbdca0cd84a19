"""Gateway admission control: per-tenant concurrency permits and a shared token bucket."""
from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Awaitable, Callable, Dict, List, Optional

log = logging.getLogger("gateway")


class Overloaded(Exception):
    def __init__(self, retry_after: float):
        super().__init__(f"retry after {retry_after:.1f}s")
        self.retry_after = retry_after


class Upstream5xx(Exception):
    pass


@dataclass
class Permit:
    tenant: str
    weight: int
    taken_at: float = field(default_factory=time.monotonic)


class TenantLimiter:
    """Counts what each tenant has in flight."""

    def __init__(self, default_limit: int, limits: Optional[Dict[str, int]] = None):
        self.default_limit = default_limit
        self.limits = limits or {}
        self.in_use: Dict[str, int] = {}
        self._mu = threading.Lock()

    def grant(self, tenant: str, weight: int = 1) -> Optional[Permit]:
        with self._mu:
            limit = self.limits.get(tenant, self.default_limit)
            now = self.in_use.get(tenant, 0)
            if now + weight > limit:
                return None
            self.in_use[tenant] = now + weight
        return Permit(tenant, weight)

    def surrender(self, permit: Permit) -> None:
        with self._mu:
            self.in_use[permit.tenant] -= permit.weight


class PriorityLimiter:
    """Wraps a TenantLimiter: interactive traffic has a reserve of its own."""

    def __init__(self, inner: TenantLimiter, reserve: int):
        self.inner = inner
        self.reserve = threading.BoundedSemaphore(reserve)
        self.from_reserve: set[int] = set()

    def grant(self, tenant: str, interactive: bool) -> Optional[Permit]:
        p = self.inner.grant(tenant)  # clean: returned to the caller
        if p is not None or not interactive:
            return p
        if not self.reserve.acquire(blocking=False):  # clean: near miss, noted in from_reserve, surrender() releases
            return None
        p = Permit(tenant, 0)
        self.from_reserve.add(id(p))
        return p

    def surrender(self, p: Permit) -> None:
        if id(p) in self.from_reserve:
            self.from_reserve.discard(id(p))
            self.reserve.release()
            return
        self.inner.surrender(p)

    def grant_burst(self, tenant: str, n: int) -> List[Permit]:
        got: List[Permit] = []
        for _ in range(n):
            p = self.inner.grant(tenant)  # leak: those granted before a refusal are dropped
            if p is None:
                return []
            got.append(p)
        return got

    def grant_upto(self, tenant: str, n: int) -> List[Permit]:
        got: List[Permit] = []
        while len(got) < n:
            p = self.inner.grant(tenant)  # clean: near miss, a partial list is returned on refusal
            if p is None:
                break
            got.append(p)
        return got


Handler = Callable[[Dict[str, Any]], Awaitable[Dict[str, Any]]]


class Gateway:
    def __init__(self, limiter: TenantLimiter, prio: PriorityLimiter, upstream: Handler, global_limit: int = 512):
        self.limiter = limiter
        self.prio = prio
        self.upstream = upstream
        self.slots = asyncio.Semaphore(global_limit)
        self.tasks: Dict[str, asyncio.Task] = {}
        self.long_running: Dict[str, Permit] = {}

    async def handle(self, req: Dict[str, Any]) -> Dict[str, Any]:
        permit = self.limiter.grant(req["tenant"])  # clean: surrendered in finally
        if permit is None:
            raise Overloaded(1.0)
        try:
            async with self.slots:
                return await self.upstream(req)
        finally:
            self.limiter.surrender(permit)

    async def handle_weighted(self, req: Dict[str, Any]) -> Dict[str, Any]:
        weight = max(1, req.get("n", 1))
        permit = self.limiter.grant(req["tenant"], weight)  # leak: a bad request is answered before the try
        if permit is None:
            raise Overloaded(2.0)
        if "prompt" not in req and "messages" not in req:
            return {"status": 400, "error": "no prompt"}
        try:
            return await self.upstream(req)
        finally:
            self.limiter.surrender(permit)

    async def handle_both(self, req: Dict[str, Any]) -> Dict[str, Any]:
        permit = self.prio.grant(req["tenant"], req.get("interactive", False))  # leak: not surrendered when the global slots are locked
        if permit is None:
            raise Overloaded(0.5)
        if self.slots.locked():
            raise Overloaded(0.2)
        await self.slots.acquire()  # clean: released in finally
        try:
            return await self.upstream(req)
        finally:
            self.slots.release()
            self.prio.surrender(permit)

    async def handle_both_ordered(self, req: Dict[str, Any]) -> Dict[str, Any]:
        await self.slots.acquire()  # clean: near miss, released where the grant fails and in finally
        permit = self.prio.grant(req["tenant"], req.get("interactive", False))  # clean: surrendered in finally
        if permit is None:
            self.slots.release()
            raise Overloaded(0.5)
        try:
            return await self.upstream(req)
        finally:
            self.prio.surrender(permit)
            self.slots.release()

    async def retrying(self, req: Dict[str, Any], attempts: int = 4) -> Dict[str, Any]:
        delay = 0.05
        for i in range(attempts):
            permit = self.limiter.grant(req["tenant"])  # leak: a 5xx goes to the next attempt with the permit out
            if permit is None:
                await asyncio.sleep(delay)
                delay *= 2
                continue
            try:
                res = await self.upstream(req)
            except Upstream5xx as e:
                log.warning("attempt %d: %s", i, e)
                await asyncio.sleep(delay * random.random())
                continue
            self.limiter.surrender(permit)
            return res
        raise Overloaded(delay)

    async def retrying_one_permit(self, req: Dict[str, Any], attempts: int = 4) -> Dict[str, Any]:
        permit = self.limiter.grant(req["tenant"])  # clean: one permit for all attempts, finally
        if permit is None:
            raise Overloaded(1.0)
        try:
            for i in range(attempts):
                try:
                    return await self.upstream(req)
                except Upstream5xx:
                    await asyncio.sleep(0.05 * 2 ** i)
            raise Overloaded(1.0)
        finally:
            self.limiter.surrender(permit)

    # -- background -----------------------------------------------------------

    def submit(self, job_id: str, req: Dict[str, Any]) -> bool:
        permit = self.limiter.grant(req["tenant"])  # clean: near miss, the task's done callback surrenders it
        if permit is None:
            return False
        task = asyncio.ensure_future(self.upstream(req))
        self.tasks[job_id] = task

        def done(_: asyncio.Task) -> None:
            self.tasks.pop(job_id, None)
            self.limiter.surrender(permit)

        task.add_done_callback(done)
        return True

    def submit_unique(self, job_id: str, req: Dict[str, Any]) -> bool:
        permit = self.limiter.grant(req["tenant"])  # leak: a job that already runs returns False with the permit
        if permit is None or job_id in self.tasks:
            return False
        task = asyncio.ensure_future(self._run_and_surrender(permit, req))
        self.tasks[job_id] = task
        return True

    async def _run_and_surrender(self, permit: Permit, req: Dict[str, Any]) -> None:
        try:
            await self.upstream(req)
        finally:
            self.limiter.surrender(permit)

    def start_stream(self, sid: str, tenant: str) -> bool:
        if sid in self.long_running:
            return True
        permit = self.limiter.grant(tenant)  # clean: kept in long_running, stop_stream() or sweep() surrenders
        if permit is None:
            return False
        self.long_running[sid] = permit
        return True

    def stop_stream(self, sid: str) -> None:
        permit = self.long_running.pop(sid, None)
        if permit is not None:
            self.limiter.surrender(permit)

    def sweep(self, max_age: float) -> None:
        now = time.monotonic()
        for sid in [s for s, p in self.long_running.items() if now - p.taken_at > max_age]:
            self.stop_stream(sid)
