"""HTTP front of the engine: admission tickets, per-tenant concurrency and token streaming."""
from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import AsyncIterator, Optional

logger = logging.getLogger("gateway")


@dataclass(eq=False)
class Ticket:
    tenant: str
    weight: int
    issued: float = field(default_factory=time.monotonic)


class AdmissionDesk:
    """Issues tickets up to a total weight; every ticket must be returned."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.issued: set[Ticket] = set()

    @property
    def load(self) -> int:
        return sum(t.weight for t in self.issued)

    def issue(self, tenant: str, weight: int) -> Optional[Ticket]:
        if self.load + weight > self.capacity:
            return None
        ticket = Ticket(tenant, weight)
        self.issued.add(ticket)
        return ticket

    def redeem(self, ticket: Ticket) -> None:
        self.issued.discard(ticket)

    async def wait_issue(self, tenant: str, weight: int, patience: float) -> Optional[Ticket]:
        until = time.monotonic() + patience
        while time.monotonic() < until:
            ticket = self.issue(tenant, weight)  # clean: None-checked and handed to the caller
            if ticket is not None:
                return ticket
            await asyncio.sleep(0.01)
        return None


class TenantGate:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._sems: dict[str, asyncio.Semaphore] = {}

    async def enter(self, tenant: str) -> None:
        sem = self._sems.setdefault(tenant, asyncio.Semaphore(self.limit))
        await sem.acquire()  # clean: leave() releases it

    def leave(self, tenant: str) -> None:
        self._sems[tenant].release()


@dataclass
class Completion:
    rid: str
    tenant: str
    prompt: list[int]
    max_tokens: int
    stream: bool = False
    ticket: Optional[Ticket] = None


class Engine:
    async def tokens(self, req: Completion) -> AsyncIterator[int]:
        for i in range(req.max_tokens):
            await asyncio.sleep(0)
            yield (sum(req.prompt) + i) % 32000


class Gateway:
    def __init__(self, desk: AdmissionDesk, gate: TenantGate, engine: Engine) -> None:
        self.desk = desk
        self.gate = gate
        self.engine = engine
        self.tasks: dict[str, asyncio.Task[list[int]]] = {}
        self.quiet: dict[str, Ticket] = {}
        self.batch: list[Completion] = []
        self.banned: set[str] = set()

    @asynccontextmanager
    async def seat(self, tenant: str) -> AsyncIterator[None]:
        await self.gate.enter(tenant)  # clean: left in finally
        try:
            yield
        finally:
            self.gate.leave(tenant)

    async def complete(self, req: Completion) -> Optional[list[int]]:
        ticket = await self.desk.wait_issue(req.tenant, req.max_tokens, 2.0)  # clean: redeemed in finally
        if ticket is None:
            return None
        try:
            async with self.seat(req.tenant):  # clean: async context manager leaves the gate
                return [t async for t in self.engine.tokens(req)]
        finally:
            self.desk.redeem(ticket)

    async def complete_checked(self, req: Completion) -> Optional[list[int]]:
        await self.gate.enter(req.tenant)  # leak: banned tenants return without leave()
        if req.tenant in self.banned:
            logger.warning("tenant %s is banned", req.tenant)
            return None
        out = [t async for t in self.engine.tokens(req)]
        self.gate.leave(req.tenant)
        return out

    async def stream(self, req: Completion) -> AsyncIterator[str]:
        ticket = self.desk.issue(req.tenant, req.max_tokens)  # clean: redeemed by the generator's finally
        if ticket is None:
            yield "data: [BUSY]\n\n"
            return
        try:
            async for token in self.engine.tokens(req):
                yield f"data: {token}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.desk.redeem(ticket)

    async def stream_until(self, req: Completion, stop: int) -> AsyncIterator[int]:
        ticket = self.desk.issue(req.tenant, req.max_tokens)  # leak: the stop token returns before redeem
        if ticket is None:
            return
        async for token in self.engine.tokens(req):
            if token == stop:
                return
            yield token
        self.desk.redeem(ticket)

    def spawn(self, req: Completion) -> bool:
        ticket = self.desk.issue(req.tenant, req.max_tokens)  # clean: near miss, the done callback redeems it
        if ticket is None:
            return False
        task = asyncio.ensure_future(self._collect(req))
        task.add_done_callback(lambda _: self.desk.redeem(ticket))
        self.tasks[req.rid] = task
        return True

    async def _collect(self, req: Completion) -> list[int]:
        try:
            return [t async for t in self.engine.tokens(req)]
        finally:
            self.tasks.pop(req.rid, None)

    def spawn_quiet(self, req: Completion) -> bool:
        ticket = self.desk.issue(req.tenant, 1)  # leak: _drain removes it from `quiet` and never redeems it
        if ticket is None:
            return False
        self.quiet[req.rid] = ticket
        self.tasks[req.rid] = asyncio.ensure_future(self._drain(req))
        return True

    async def _drain(self, req: Completion) -> list[int]:
        out: list[int] = []
        async for token in self.engine.tokens(req):
            out.append(token)
        self.tasks.pop(req.rid, None)
        self.quiet.pop(req.rid, None)
        return out

    def enqueue(self, req: Completion) -> bool:
        req.ticket = self.desk.issue(req.tenant, req.max_tokens)  # clean: near miss, flush() redeems
        if req.ticket is None:
            return False
        self.batch.append(req)
        return True

    async def flush(self) -> dict[str, list[int]]:
        batch, self.batch = self.batch, []
        out: dict[str, list[int]] = {}
        for req in batch:
            out[req.rid] = [t async for t in self.engine.tokens(req)]
            if req.ticket is not None:
                self.desk.redeem(req.ticket)
                req.ticket = None
        return out

    async def complete_many(self, reqs: list[Completion]) -> list[Optional[list[int]]]:
        results: list[Optional[list[int]]] = []
        for req in reqs:
            ticket = self.desk.issue(req.tenant, req.max_tokens)  # leak: an empty prompt continues unredeemed
            if ticket is None:
                results.append(None)
                continue
            if not req.prompt:
                results.append([])
                continue
            results.append([t async for t in self.engine.tokens(req)])
            self.desk.redeem(ticket)
        return results

    async def probe(self, tenant: str) -> bool:
        ticket = await self.desk.wait_issue(tenant, 1, 0.05)  # leak: only compared with None
        return ticket is not None
