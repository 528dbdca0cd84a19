"""HTTP-facing gateway: tickets for admission, upstream connections for streaming."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Optional

logger = logging.getLogger(__name__)


class UpstreamError(Exception):
    pass


@dataclass
class Ticket:
    tenant: str
    tokens: int
    serial: int


@dataclass
class Upstream:
    url: str
    client: Any
    uses: int = 0


@dataclass
class StreamState:
    request_id: str
    ticket: Ticket
    upstream: Upstream
    chunks: list[str] = field(default_factory=list)


class TokenBudget:
    def __init__(self, per_tenant: int) -> None:
        self.per_tenant = per_tenant
        self.spent: dict[str, int] = {}
        self._serial = 0

    def issue(self, tenant: str, tokens: int) -> Optional[Ticket]:
        spent = self.spent.get(tenant, 0)
        if spent + tokens > self.per_tenant:
            return None
        self.spent[tenant] = spent + tokens
        self._serial += 1
        return Ticket(tenant, tokens, self._serial)

    def redeem(self, ticket: Ticket) -> None:
        self.spent[ticket.tenant] -= ticket.tokens


class UpstreamPool:
    def __init__(self, upstreams: list[Upstream]) -> None:
        self._queue: asyncio.Queue[Upstream] = asyncio.Queue()
        for upstream in upstreams:
            self._queue.put_nowait(upstream)

    async def checkout(self, timeout: float) -> Optional[Upstream]:
        try:
            upstream = await asyncio.wait_for(self._queue.get(), timeout)
        except asyncio.TimeoutError:
            return None
        upstream.uses += 1
        return upstream

    def checkin(self, upstream: Upstream) -> None:
        self._queue.put_nowait(upstream)


class Gateway:
    def __init__(self, budget: TokenBudget, pool: UpstreamPool, max_tokens: int) -> None:
        self.budget = budget
        self.pool = pool
        self.max_tokens = max_tokens
        self.streams: dict[str, StreamState] = {}
        self.background: set[asyncio.Task[None]] = set()

    async def complete(self, tenant: str, prompt: str) -> Optional[str]:
        ticket = self.budget.issue(tenant, self.max_tokens)  # leak: not redeemed when no upstream comes free
        if ticket is None:
            return None
        upstream = await self.pool.checkout(5.0)  # clean: near miss, finally checks it in also on the handled UpstreamError
        if upstream is None:
            return None
        try:
            return await upstream.client.complete(prompt)
        except UpstreamError:
            return None
        finally:
            self.pool.checkin(upstream)
            self.budget.redeem(ticket)

    async def embed(self, tenant: str, text: str) -> Optional[list[float]]:
        ticket = self.budget.issue(tenant, len(text) // 4)  # clean: near miss, redeemed where no upstream is free and after the call
        if ticket is None:
            return None
        upstream = await self.pool.checkout(1.0)  # clean: checked in after the call
        if upstream is None:
            self.budget.redeem(ticket)
            return None
        vector = await upstream.client.embed(text)
        self.pool.checkin(upstream)
        self.budget.redeem(ticket)
        return vector

    async def open_stream(self, request_id: str, tenant: str) -> bool:
        if request_id in self.streams:
            return False
        ticket = self.budget.issue(tenant, self.max_tokens)  # clean: near miss, the StreamState owns it until close_stream, and the refusal redeems it
        if ticket is None:
            return False
        upstream = await self.pool.checkout(5.0)  # clean: owned by the StreamState until close_stream
        if upstream is None:
            self.budget.redeem(ticket)
            return False
        self.streams[request_id] = StreamState(request_id, ticket, upstream)
        return True

    async def read_stream(self, request_id: str) -> AsyncIterator[str]:
        state = self.streams[request_id]
        try:
            async for chunk in state.upstream.client.stream(request_id):
                state.chunks.append(chunk)
                yield chunk
        finally:
            self.close_stream(request_id)

    def close_stream(self, request_id: str) -> None:
        state = self.streams.pop(request_id, None)
        if state is None:
            return
        self.pool.checkin(state.upstream)
        self.budget.redeem(state.ticket)

    async def failover(self, request_id: str) -> bool:
        state = self.streams[request_id]
        state.upstream = await self.pool.checkout(2.0) or state.upstream  # leak: the failed upstream is overwritten and never checked in
        return True

    def submit(self, tenant: str, prompt: str) -> bool:
        ticket = self.budget.issue(tenant, self.max_tokens)  # clean: near miss, handed to the task, which redeems it in finally
        if ticket is None:
            return False
        task = asyncio.get_running_loop().create_task(self._run_batch(ticket, prompt))
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return True

    async def _run_batch(self, ticket: Ticket, prompt: str) -> None:
        try:
            upstream = await self.pool.checkout(60.0)  # leak: an UpstreamError is logged and the upstream not checked in
            if upstream is None:
                return
            try:
                await upstream.client.complete(prompt)
            except UpstreamError as exc:
                logger.warning("batch request of %s failed: %s", ticket.tenant, exc)
                return
            self.pool.checkin(upstream)
        finally:
            self.budget.redeem(ticket)

    def admit_many(self, tenant: str, sizes: list[int]) -> list[Ticket]:
        tickets: list[Ticket] = []
        for size in sizes:
            ticket = self.budget.issue(tenant, size)  # clean: near miss, all are redeemed if one is refused, else the caller has them
            if ticket is None:
                for granted in tickets:
                    self.budget.redeem(granted)
                return []
            tickets.append(ticket)
        return tickets

    async def run_group(self, tenant: str, prompts: list[str]) -> list[str]:
        tickets = self.admit_many(tenant, [len(p) for p in prompts])  # leak: zip with the kept prompts leaves the tickets of the empty ones
        if not tickets:
            return []
        answers: list[str] = []
        kept = [p for p in prompts if p.strip()]
        for ticket, prompt in zip(tickets, kept):
            answers.append(await self.complete(tenant, prompt) or "")
            self.budget.redeem(ticket)
        return answers

    async def dry_run(self, tenant: str, prompts: list[str]) -> int:
        tickets = self.admit_many(tenant, [len(p) for p in prompts])  # clean: near miss, an empty answer holds nothing and the loop redeems every ticket
        total = 0
        for ticket in tickets:
            total += ticket.tokens
            self.budget.redeem(ticket)
        return total
