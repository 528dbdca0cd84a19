"""Admission control: tenant quotas, in-flight permits and token credits (asyncio)."""
from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Dict, List, Optional

log = logging.getLogger(__name__)


class Overloaded(Exception):
    status = 429


class CreditMeter:
    """Token credits of a tenant, replenished by refund()."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def charge(self, n: int) -> bool:
        if self.used + n > self.limit:
            return False
        self.used += n
        return True

    def refund(self, n: int) -> None:
        self.used -= n


class Permits:
    """A counter with waiters. enter() waits, leave() wakes the next."""

    def __init__(self, n: int) -> None:
        self._sem = asyncio.Semaphore(n)
        self.inside = 0

    async def enter(self, timeout: Optional[float] = None) -> None:
        if timeout is None:
            await self._sem.acquire()  # clean: leave() releases it
        else:
            await asyncio.wait_for(self._sem.acquire(), timeout)  # clean: leave() releases it
        self.inside += 1

    async def enter_unless(self, stopping: asyncio.Event) -> bool:
        await self._sem.acquire()  # leak: not released when the gate is stopping
        if stopping.is_set():
            return False
        self.inside += 1
        return True

    def leave(self) -> None:
        self.inside -= 1
        self._sem.release()

    @contextlib.asynccontextmanager
    async def inside_of(self) -> AsyncIterator[None]:
        await self.enter()  # clean: left in finally
        try:
            yield
        finally:
            self.leave()


@dataclass
class Tenant:
    name: str
    meter: CreditMeter
    priority: int = 0
    blocked: bool = False


@dataclass
class Ticket:
    rid: str
    tenant: Tenant
    cost: int
    charged: bool = False
    entered: bool = False
    made: float = field(default_factory=time.monotonic)


class AdmissionGate:
    def __init__(self, permits: Permits, tenants: Dict[str, Tenant]) -> None:
        self.permits = permits
        self.batch_permits = Permits(4)
        self.tenants = tenants
        self.open: Dict[str, Ticket] = {}
        self.stopping = asyncio.Event()
        self._tasks: set = set()

    async def admit(self, rid: str, tenant: str, cost: int) -> Ticket:
        t = self.tenants[tenant]
        if not t.meter.charge(cost):  # leak: not refunded when enter() times out
            raise Overloaded(tenant)
        try:
            await self.permits.enter(timeout=2.0)  # clean: the ticket carries it to the caller, _settle_ticket() leaves
        except asyncio.TimeoutError:
            raise Overloaded(tenant) from None
        return Ticket(rid, t, cost, charged=True, entered=True)

    async def admit_fair(self, rid: str, tenant: str, cost: int) -> Ticket:
        t = self.tenants[tenant]
        ticket = Ticket(rid, t, cost)
        self.open[rid] = ticket
        if not t.meter.charge(cost):  # clean: near miss, ticket.charged is set and the handler below closes it
            del self.open[rid]
            raise Overloaded(tenant)
        ticket.charged = True
        try:
            await self.permits.enter(timeout=5.0)  # clean: near miss, ticket.entered is set for close()
        except asyncio.TimeoutError:
            self.close(rid)
            raise Overloaded(tenant) from None
        ticket.entered = True
        return ticket

    def close(self, rid: str) -> None:
        ticket = self.open.pop(rid, None)
        if ticket is not None:
            self._settle_ticket(ticket)

    def _settle_ticket(self, ticket: Ticket) -> None:
        if ticket.charged:
            ticket.tenant.meter.refund(ticket.cost)
            ticket.charged = False
        if ticket.entered:
            self.permits.leave()
            ticket.entered = False

    async def handle(self, rid: str, tenant: str, body: Dict[str, Any], backend) -> Any:
        await self.admit_fair(rid, tenant, len(body["prompt"]))  # clean: closed in finally
        try:
            return await backend.generate(body)
        finally:
            self.close(rid)

    async def handle_simple(self, rid: str, tenant: str, body: Dict[str, Any], backend) -> Any:
        ticket = await self.admit(rid, tenant, len(body["prompt"]))  # leak: a blocked tenant's ticket is dropped unsettled
        if ticket.tenant.blocked:
            return {"error": "blocked"}
        try:
            return await backend.generate(body)
        finally:
            self._settle_ticket(ticket)

    async def count_tokens(self, text: str, tokenizer) -> int:
        await self.permits.enter()  # leak: not left for an empty text
        if not text:
            return 0
        n = await tokenizer.count(text)
        self.permits.leave()
        return n

    async def embed(self, texts: List[str], backend) -> List[Any]:
        out = []
        for t in texts:
            async with self.permits.inside_of():  # clean: an async context manager
                if not t:
                    out.append(None)
                    continue
                out.append(await backend.embed(t))
        return out

    async def run_batch_file(self, lines: List[Dict[str, Any]], backend) -> int:
        done = 0
        for line in lines:
            await self.batch_permits.enter()  # leak: continue on a malformed line skips leave()
            if "prompt" not in line:
                log.warning("line without prompt")
                continue
            try:
                await backend.generate(line)
                done += 1
            finally:
                self.batch_permits.leave()
        return done

    async def spawn(self, line: Dict[str, Any], backend) -> asyncio.Task:
        await self.batch_permits.enter()  # clean: near miss, the task's done callback leaves
        task = asyncio.ensure_future(backend.generate(line))
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        self.batch_permits.leave()

    async def maintenance(self, job) -> bool:
        if not await self.permits.enter_unless(self.stopping):  # clean: left in finally once entered
            return False
        try:
            await job()
            return True
        finally:
            self.permits.leave()

    async def exclusive(self, n: int, job) -> None:
        """Take the whole gate for a weight update."""
        taken = 0
        try:
            for _ in range(n):
                await self.permits.enter()  # clean: near miss, taken counts them for finally
                taken += 1
            await job()
        finally:
            for _ in range(taken):
                self.permits.leave()

    async def probe(self, tenant: str, backend) -> Optional[float]:
        meter = self.tenants[tenant].meter
        if not meter.charge(1):  # clean: refunded in finally
            return None
        t0 = time.monotonic()
        try:
            await backend.generate({"prompt": "ping", "max_tokens": 1})
        except ConnectionError:
            return None
        finally:
            meter.refund(1)
        return time.monotonic() - t0

    def transfer_credit(self, src: str, dst: str, n: int) -> bool:
        """Borrow n credits of both tenants for a joint run."""
        a, b = self.tenants[src].meter, self.tenants[dst].meter
        if not a.charge(n):  # leak: not refunded when the second tenant can't pay
            return False
        if not b.charge(n):  # clean: the joint run refunds both through settle()
            return False
        return True

    def settle(self, src: str, dst: str, n: int) -> None:
        self.tenants[src].meter.refund(n)
        self.tenants[dst].meter.refund(n)
