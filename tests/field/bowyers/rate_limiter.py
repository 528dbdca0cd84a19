"""Admission control for the inference gateway: concurrency permits and token budgets."""
from __future__ import annotations

import asyncio
import functools
import logging
import time
from dataclasses import dataclass
from typing import Any, Awaitable, Callable, Optional

log = logging.getLogger(__name__)


class PermitGate:
    """Fixed number of requests in flight; enter() waits, try_enter() does not."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_flight = 0
        self._queue: list[asyncio.Future] = []

    def try_enter(self) -> bool:
        if self.in_flight >= self.limit:
            return False
        self.in_flight += 1
        return True

    async def enter(self) -> None:
        while not self.try_enter():  # clean: the permit belongs to the caller of enter()
            fut = asyncio.get_running_loop().create_future()
            self._queue.append(fut)
            await fut

    def leave(self) -> None:
        self.in_flight -= 1
        while self._queue:
            fut = self._queue.pop(0)
            if not fut.done():
                fut.set_result(None)
                break


@dataclass
class Grant:
    tenant: str
    tokens: int
    taken_at: float


class TokenBudget:
    """Prompt and output tokens that each tenant may have outstanding."""

    def __init__(self, per_tenant: int) -> None:
        self._per_tenant = per_tenant
        self._used: dict[str, int] = {}
        self._grants = 0

    def grant(self, tenant: str, tokens: int) -> Optional[Grant]:
        used = self._used.get(tenant, 0)
        if used + tokens > self._per_tenant:
            return None
        self._used[tenant] = used + tokens
        self._grants += 1
        return Grant(tenant, tokens, time.monotonic())

    def settle(self, g: Grant) -> None:
        self._used[g.tenant] -= g.tokens
        self._grants -= 1

    def shrink(self, g: Grant, tokens: int) -> None:
        """Give part of a grant back early; the rest is still settled later."""
        self._used[g.tenant] -= g.tokens - tokens
        g.tokens = tokens


class Throttle:
    """Scope for one request on a gate."""

    def __init__(self, gate: PermitGate) -> None:
        self._gate = gate

    async def __aenter__(self) -> "Throttle":
        await self._gate.enter()  # clean: __aexit__ leaves the gate
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._gate.leave()


class SlowStartThrottle:
    """Scope for one request that also counts the requests of the warm-up."""

    def __init__(self, gate: PermitGate, warm_after: int) -> None:
        self._gate = gate
        self._warm_after = warm_after
        self._seen = 0

    async def __aenter__(self) -> "SlowStartThrottle":
        await self._gate.enter()  # leak: __aexit__ returns during warm-up without leaving the gate
        self._seen += 1
        return self

    async def __aexit__(self, exc_type, exc, tb) -> bool:
        if self._seen <= self._warm_after:
            log.info("warm-up request %d of %d ended", self._seen, self._warm_after)
            return False
        self._gate.leave()
        return False


Backend = Callable[[dict], Awaitable[dict]]


class Gateway:
    def __init__(self, gate: PermitGate, budget: TokenBudget, backend: Backend) -> None:
        self.gate = gate
        self.budget = budget
        self.backend = backend
        self.rejected = 0
        self._open: dict[str, Grant] = {}

    async def complete(self, tenant: str, body: dict) -> dict:
        async with Throttle(self.gate):  # clean: leaves the gate at the end of the block
            grant = self.budget.grant(tenant, body["max_tokens"])  # clean: settled in the finally
            if grant is None:
                self.rejected += 1
                return {"status": 429}
            try:
                return await self.backend(body)
            finally:
                self.budget.settle(grant)

    async def complete_fast(self, tenant: str, body: dict) -> dict:
        if not self.gate.try_enter():  # leak: the 429 for an exhausted budget does not leave the gate
            return {"status": 503}
        grant = self.budget.grant(tenant, body["max_tokens"])  # clean: settled after the backend call
        if grant is None:
            self.rejected += 1
            return {"status": 429}
        reply = await self.backend(body)
        self.budget.settle(grant)
        self.gate.leave()
        return reply

    async def embed(self, tenant: str, texts: list[str]) -> dict:
        if not self.gate.try_enter():  # clean: left on both ways
            return {"status": 503}
        grant = self.budget.grant(tenant, sum(len(t) // 4 + 1 for t in texts))  # clean: settled later
        if grant is None:
            self.gate.leave()
            return {"status": 429}
        reply = await self.backend({"texts": texts})
        self.budget.settle(grant)
        self.gate.leave()
        return reply

    async def rerank(self, tenant: str, query: str, docs: list[str]) -> list[float]:
        scores: list[float] = []
        for doc in docs:
            grant = self.budget.grant(tenant, len(query) + len(doc))  # leak: continue for a cached score
            if grant is None:
                scores.append(0.0)
                continue
            reply = await self.backend({"query": query, "doc": doc})
            if reply.get("cached"):
                scores.append(reply["score"])
                continue
            scores.append(reply.get("score", 0.0))
            self.budget.settle(grant)
        return scores

    async def with_retry(self, tenant: str, body: dict, tries: int = 3) -> Optional[dict]:
        for attempt in range(tries):
            grant = self.budget.grant(tenant, body["max_tokens"])  # leak: a failed attempt takes another
            if grant is None:
                return None
            reply = await self.backend(body)
            if reply.get("status") == 200:
                self.budget.settle(grant)
                return reply
            await asyncio.sleep(0.1 * 2 ** attempt)
        return None

    async def with_retry_shared(self, tenant: str, body: dict, tries: int = 3) -> Optional[dict]:
        grant = self.budget.grant(tenant, body["max_tokens"])  # clean: one for all, settled at the end
        if grant is None:
            return None
        reply: Optional[dict] = None
        for attempt in range(tries):
            reply = await self.backend(body)
            if reply.get("status") == 200:
                break
            await asyncio.sleep(0.1 * 2 ** attempt)
        self.budget.settle(grant)
        return reply

    # -- streams

    def open_stream(self, stream_id: str, tenant: str, tokens: int) -> bool:
        if stream_id in self._open:
            return False
        grant = self.budget.grant(tenant, tokens)  # leak: extend_stream() replaces it unsettled
        if grant is None:
            return False
        self._open[stream_id] = grant
        return True

    def extend_stream(self, stream_id: str, tokens: int) -> bool:
        held = self._open[stream_id]
        more = self.budget.grant(held.tenant, held.tokens + tokens)  # leak: the next one overwrites it
        if more is None:
            return False
        self._open[stream_id] = more
        return True

    def trim_stream(self, stream_id: str, tokens: int) -> None:
        self.budget.shrink(self._open[stream_id], tokens)

    def close_stream(self, stream_id: str) -> None:
        self.budget.settle(self._open.pop(stream_id))


def limited(gate: PermitGate) -> Callable[[Callable[..., Awaitable[Any]]], Callable[..., Awaitable[Any]]]:
    """Decorator: run the coroutine function under a permit."""

    def wrap(fn: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(fn)
        async def inner(*args: Any, **kwargs: Any) -> Any:
            await gate.enter()  # clean: left in the finally
            try:
                return await fn(*args, **kwargs)
            finally:
                gate.leave()

        return inner

    return wrap


async def fire_and_count(gate: PermitGate, calls: list[Callable[[], Awaitable[None]]]) -> int:
    """Start each call as its own task; the permit goes with the task."""
    started = 0
    tasks: set[asyncio.Task] = set()
    for call in calls:
        await gate.enter()  # clean: near miss, the done callback of the task leaves the gate
        task = asyncio.ensure_future(call())
        tasks.add(task)
        task.add_done_callback(lambda _t: gate.leave())
        started += 1
    await asyncio.gather(*tasks)
    return started


async def fire_bounded(gate: PermitGate, calls: list[Callable[[], Awaitable[None]]], cap: int) -> int:
    tasks: list[asyncio.Task] = []
    for call in calls:
        await gate.enter()  # leak: the permit of the call that meets the cap is not given back
        if len(tasks) >= cap:
            break
        task = asyncio.ensure_future(call())
        task.add_done_callback(lambda _t: gate.leave())
        tasks.append(task)
    await asyncio.gather(*tasks)
    return len(tasks)


async def wait_idle(gate: PermitGate, timeout: float) -> bool:
    """Take all permits and give them back: true if the gate was quiet."""
    end = time.monotonic() + timeout
    taken = 0
    while taken < gate.limit and time.monotonic() < end:
        if gate.try_enter():  # clean: near miss, counted, and the count is left below
            taken += 1
        else:
            await asyncio.sleep(0.01)
    quiet = taken == gate.limit
    for _ in range(taken):
        gate.leave()
    return quiet
