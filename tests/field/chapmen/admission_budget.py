"""Token budgets and tenant quotas in front of the scheduler."""
from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Protocol, Tuple


class Budget(Protocol):
    def reserve(self, tokens: int) -> bool: ...

    def refund(self, tokens: int) -> None: ...


class TokenBudget:
    """Tokens which may be in flight at one time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def reserve(self, tokens: int) -> bool:
        if self.used + tokens > self.limit:
            return False
        self.used += tokens
        return True

    def refund(self, tokens: int) -> None:
        self.used -= tokens


class TenantSeats:
    """Concurrent requests of each tenant."""

    def __init__(self, per_tenant: int) -> None:
        self.per_tenant = per_tenant
        self._taken: Dict[str, int] = {}

    def sit(self, tenant: str) -> bool:
        if self._taken.get(tenant, 0) >= self.per_tenant:
            return False
        self._taken[tenant] = self._taken.get(tenant, 0) + 1
        return True

    def leave(self, tenant: str) -> None:
        self._taken[tenant] -= 1


@dataclass(order=True)
class Ticket:
    priority: int
    order: int
    tenant: str = field(compare=False)
    prompt: int = field(compare=False)
    max_new: int = field(compare=False)
    deadline: float = field(compare=False, default=0.0)
    reserved: int = field(compare=False, default=0)

    @property
    def total(self) -> int:
        return self.prompt + self.max_new


class Admission:
    def __init__(self, budget: TokenBudget, seats: TenantSeats) -> None:
        self.budget = budget
        self.seats = seats
        self._heap: List[Ticket] = []
        self._seq = itertools.count()
        self.active: Dict[int, Ticket] = {}
        self.rejected = 0

    def offer(self, tenant: str, prompt: int, max_new: int, priority: int = 0) -> Ticket:
        ticket = Ticket(priority, next(self._seq), tenant, prompt, max_new, time.monotonic() + 30.0)
        heapq.heappush(self._heap, ticket)
        return ticket

    # -- admit and finish ----------------------------------------------

    def admit_one(self) -> Optional[Ticket]:
        if not self._heap:
            return None
        ticket = self._heap[0]
        if not self.seats.sit(ticket.tenant):  # clean: left on a short budget, else by finish()
            return None
        if not self.budget.reserve(ticket.total):  # clean: recorded in the ticket, refunded by finish()
            self.seats.leave(ticket.tenant)
            return None
        heapq.heappop(self._heap)
        ticket.reserved = ticket.total
        self.active[ticket.order] = ticket
        return ticket

    def admit_now(self, ticket: Ticket) -> bool:
        """Express lane: the ticket never enters the heap."""
        ok = (
            self.seats.sit(ticket.tenant)  # leak: a short budget fails the test, the seat stays taken
            and self.budget.reserve(ticket.total)  # clean: near miss, last of the chain, refunded by finish()
        )
        if not ok:
            self.rejected += 1
            return False
        ticket.reserved = ticket.total
        self.active[ticket.order] = ticket
        return True

    def admit_backfill(self, limit: int) -> List[Ticket]:
        """Fills the rest of the budget with whatever fits."""
        admitted: List[Ticket] = []
        kept: List[Ticket] = []
        while self._heap and len(admitted) < limit:
            ticket = heapq.heappop(self._heap)
            if not self.budget.reserve(ticket.total):  # leak: an expired ticket takes it along
                kept.append(ticket)
                continue
            if ticket.deadline < time.monotonic():
                self.rejected += 1
                continue
            if not self.seats.sit(ticket.tenant):  # clean: near miss, finish() leaves the seat
                self.budget.refund(ticket.total)
                kept.append(ticket)
                continue
            ticket.reserved = ticket.total
            self.active[ticket.order] = ticket
            admitted.append(ticket)
        for ticket in kept:
            heapq.heappush(self._heap, ticket)
        return admitted

    def extend(self, order: int, extra: int) -> bool:
        """More output tokens for a running request."""
        ticket = self.active[order]
        if not self.budget.reserve(extra):  # leak: not in ticket.reserved, so finish() does not refund it
            return False
        ticket.max_new += extra
        return True

    def shrink(self, order: int, produced: int) -> None:
        ticket = self.active[order]
        spare = ticket.reserved - ticket.prompt - produced
        if spare > 0:
            self.budget.refund(spare)
            ticket.reserved -= spare

    def finish(self, order: int) -> None:
        ticket = self.active.pop(order, None)
        if ticket is None:
            return
        self.budget.refund(ticket.reserved)
        self.seats.leave(ticket.tenant)

    # -- embeddings: no output, so a reservation lives for one call -----

    def embed(self, tenant: str, lengths: List[int], cap: int) -> Tuple[int, str]:
        total = sum(lengths)
        if not self.seats.sit(tenant):  # leak: a batch over the cap returns with the seat taken
            return 0, "tenant busy"
        if total > cap:
            return 0, "batch too large"
        if not self.budget.reserve(total):  # clean: refunded after the batch
            self.seats.leave(tenant)
            return 0, "no budget"
        done = len([n for n in lengths if n > 0])
        self.budget.refund(total)
        self.seats.leave(tenant)
        return done, "ok"

    def probe(self, tenant: str, tokens: int) -> bool:
        """Would a request of this size get in?"""
        seated = self.seats.sit(tenant)  # clean: near miss, left under the same flag
        room = self.budget.reserve(tokens)  # clean: near miss, refunded under the same flag
        if room:
            self.budget.refund(tokens)
        if seated:
            self.seats.leave(tenant)
        return seated and room


class Borrowing:
    """Two-level budget: a tenant share, then the common overflow."""

    def __init__(self, share: Budget, overflow: Budget) -> None:
        self.share = share
        self.overflow = overflow
        self._from: Dict[str, Tuple[str, int]] = {}
        self._bursts: Dict[str, int] = {}

    def open(self, rid: str, tokens: int) -> bool:
        if rid in self._from:
            return True
        if self.share.reserve(tokens):  # clean: noted under rid as share, close() refunds it there
            self._from[rid] = ("share", tokens)
            return True
        if self.overflow.reserve(tokens):  # clean: noted under rid as overflow
            self._from[rid] = ("overflow", tokens)
            return True
        return False

    def close(self, rid: str) -> None:
        where, tokens = self._from.pop(rid, ("", 0))
        if where == "share":
            self.share.refund(tokens)
        elif where == "overflow":
            self.overflow.refund(tokens)

    def burst(self, rid: str, tokens: int) -> bool:
        """More tokens for a while, any number of times; cool() ends them."""
        if not self.overflow.reserve(tokens):  # leak: a second burst replaces the amount of the first
            return False
        self._bursts[rid] = tokens
        return True

    def cool(self, rid: str) -> None:
        tokens = self._bursts.pop(rid, 0)
        if tokens:
            self.overflow.refund(tokens)


class Gate:
    """Bounds concurrent prefills with a semaphore."""

    def __init__(self, width: int) -> None:
        self._sem = asyncio.Semaphore(width)
        self.cold = 0

    async def prefill(self, tokens: List[int], cached: int) -> int:
        await self._sem.acquire()  # leak: fully cached prompts return early without a release
        missing = len(tokens) - cached
        if missing <= 0:
            return 0
        self.cold += 1
        await asyncio.sleep(missing * 1e-6)
        self._sem.release()
        return missing

    async def chunked(self, tokens: List[int], chunk: int) -> int:
        steps = 0
        for begin in range(0, len(tokens), chunk):
            await self._sem.acquire()  # clean: released in finally each round
            try:
                if begin + chunk >= len(tokens):
                    return steps + 1
                await asyncio.sleep(chunk * 1e-6)
                steps += 1
            finally:
                self._sem.release()
        return steps
