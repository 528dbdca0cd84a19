"""Admission tickets for the inference front end. A ticket is one unit of in-flight budget of a tenant."""
from __future__ import annotations

import asyncio
import functools
import itertools
import time
from typing import Any, Awaitable, Callable, Dict, List, Optional


class Ticket:
    def __init__(self, number: int, tenant: str, weight: int):
        self.number = number
        self.tenant = tenant
        self.weight = weight
        self.issued_at = time.monotonic()


class Gate:
    """Counts weight in flight per tenant."""

    def __init__(self, budget: int):
        self.budget = budget
        self.used = 0
        self.per_tenant: Dict[str, int] = {}
        self._seq = itertools.count()

    def issue(self, tenant: str, weight: int = 1) -> Optional[Ticket]:
        if self.used + weight > self.budget:
            return None
        self.used += weight
        self.per_tenant[tenant] = self.per_tenant.get(tenant, 0) + weight
        return Ticket(next(self._seq), tenant, weight)

    def redeem(self, t: Ticket) -> None:
        self.used -= t.weight
        self.per_tenant[t.tenant] -= t.weight


class Admission:
    """with Admission(gate, tenant) as ok: ..."""

    def __init__(self, gate: Gate, tenant: str):
        self.gate = gate
        self.tenant = tenant
        self.ticket: Optional[Ticket] = None

    def __enter__(self) -> bool:
        self.ticket = self.gate.issue(self.tenant)  # clean: __exit__ redeems it
        return self.ticket is not None

    def __exit__(self, et, ev, tb) -> bool:
        if self.ticket is not None:
            self.gate.redeem(self.ticket)
            self.ticket = None
        return False


class TimedAdmission:
    def __init__(self, gate: Gate, tenant: str, report: Callable[[float], None]):
        self.gate = gate
        self.tenant = tenant
        self.report = report
        self.ticket: Optional[Ticket] = None

    def __enter__(self) -> "TimedAdmission":
        self.ticket = self.gate.issue(self.tenant)  # leak: __exit__ returns early for an exception
        return self

    def __exit__(self, et, ev, tb):
        if self.ticket is None:
            return None
        if et is not None:
            self.report(-1.0)
            return None
        self.report(time.monotonic() - self.ticket.issued_at)
        self.gate.redeem(self.ticket)


gate = Gate(budget=256)
_parked: Dict[str, Ticket] = {}


class Request:
    def __init__(self, tenant: str, prompt: str, stream: bool = False):
        self.tenant = tenant
        self.prompt = prompt
        self.stream = stream
        self.ticket: Optional[Ticket] = None


async def handle(req: Request, run: Callable[[str], Awaitable[str]]) -> Optional[str]:
    with Admission(gate, req.tenant) as ok:  # clean: with statement
        if not ok:
            return None
        return await run(req.prompt)


async def handle_fast(req: Request, run: Callable[[str], Awaitable[str]], cache: Dict[str, str]) -> Optional[str]:
    t = gate.issue(req.tenant)  # leak: cache hit returns before redeem
    if t is None:
        return None
    hit = cache.get(req.prompt)
    if hit is not None:
        return hit
    try:
        return await run(req.prompt)
    finally:
        gate.redeem(t)


async def handle_cached(req: Request, run: Callable[[str], Awaitable[str]], cache: Dict[str, str]) -> Optional[str]:
    t = gate.issue(req.tenant)  # clean: near miss, early return sits inside the try
    if t is None:
        return None
    try:
        if req.prompt in cache:
            return cache[req.prompt]
        cache[req.prompt] = await run(req.prompt)
        return cache[req.prompt]
    finally:
        gate.redeem(t)


def park(req: Request) -> bool:
    t = gate.issue(req.tenant, weight=2)  # clean: near miss, stays in _parked until resume() or expire()
    if t is None:
        return False
    prev = _parked.pop(req.prompt, None)
    if prev is not None:
        gate.redeem(prev)
    _parked[req.prompt] = t
    return True


def resume(prompt: str) -> None:
    t = _parked.pop(prompt, None)  # clean: redeemed
    if t is not None:
        gate.redeem(t)


def expire(now: float, ttl: float) -> int:
    gone = [p for p, t in _parked.items() if now - t.issued_at > ttl]
    for p in gone:
        gate.redeem(_parked.pop(p))
    return len(gone)


def steal(prompt: str, min_age: float) -> bool:
    t = _parked.pop(prompt, None)  # leak: a ticket too young is popped and neither redeemed nor put back
    if t is None:
        return False
    if time.monotonic() - t.issued_at < min_age:
        return False
    gate.redeem(t)
    return True


def attach(req: Request) -> bool:
    req.ticket = gate.issue(req.tenant)  # clean: detach() redeems it
    return req.ticket is not None


def detach(req: Request) -> None:
    if req.ticket is not None:
        gate.redeem(req.ticket)
        req.ticket = None


async def serve_one(req: Request, run: Callable[[str], Awaitable[str]]) -> str:
    if not attach(req):  # clean: near miss, detach() in finally gives back what attach put on the request
        return "busy"
    try:
        return await run(req.prompt)
    finally:
        detach(req)


def spawn(req: Request, run: Callable[[str], Awaitable[str]]) -> Optional[asyncio.Task]:
    t = gate.issue(req.tenant)  # clean: near miss, done callback redeems it
    if t is None:
        return None
    task = asyncio.ensure_future(run(req.prompt))
    task.add_done_callback(lambda _fut: gate.redeem(t))
    return task


def spawn_streaming(req: Request, run: Callable[[str], Awaitable[str]]) -> Optional[asyncio.Task]:
    t = gate.issue(req.tenant)  # leak: callback is added for streams only
    if t is None:
        return None
    task = asyncio.ensure_future(run(req.prompt))
    if req.stream:
        task.add_done_callback(lambda _fut: gate.redeem(t))
    return task


async def fanout(tenant: str, jobs: List[Callable[[], Awaitable[Any]]]) -> Optional[List[Any]]:
    tickets: List[Ticket] = []
    for _ in jobs:
        t = gate.issue(tenant)  # leak: when the budget runs out, earlier tickets are not redeemed
        if t is None:
            return None
        tickets.append(t)
    try:
        return await asyncio.gather(*(j() for j in jobs))
    finally:
        for t in tickets:
            gate.redeem(t)
