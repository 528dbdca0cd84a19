"""Admission for a generation service: a token budget for all, a gate for each tenant."""
from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Protocol

log = logging.getLogger(__name__)


class Oversized(Exception):
    pass


class Overloaded(Exception):
    pass


class Engine(Protocol):
    async def generate(self, req: "Request") -> str: ...
    def tokens(self, req: "Request") -> AsyncIterator[str]: ...
    def count(self, text: str) -> int: ...


@dataclass(frozen=True)
class Request:
    tenant: str
    prompt: str
    cost: int


@dataclass
class Response:
    status: int
    body: str = ""


class Grant:
    """So many tokens of the budget, until release()."""

    def __init__(self, budget: TokenBudget, n: int) -> None:
        self._budget = budget
        self.n = n

    def release(self) -> None:
        n, self.n = self.n, 0
        if n:
            self._budget.put(n)


class TokenBudget:
    def __init__(self, total: int) -> None:
        self.total = total
        self._left = total
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, n: int) -> Grant:
        if n > self.total:
            raise Oversized(n)
        if self._left < n or self._waiters:
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append((n, fut))
            await fut  # leak: a timeout of the caller that comes after _wake() took the tokens loses them
        else:
            self._left -= n
        return Grant(self, n)  # clean: returned to the caller

    def put(self, n: int) -> None:
        self._left += n
        self._wake()

    def _wake(self) -> None:
        while self._waiters:
            n, fut = self._waiters[0]
            if fut.cancelled():
                self._waiters.popleft()
                continue
            if n > self._left:
                return
            self._waiters.popleft()
            self._left -= n
            fut.set_result(None)

    @asynccontextmanager
    async def hold(self, n: int) -> AsyncIterator[Grant]:
        grant = await self.acquire(n)  # clean: released by the finally
        try:
            yield grant
        finally:
            grant.release()


@dataclass
class Tenant:
    name: str
    gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(8))
    served: int = 0


class Frontend:
    def __init__(self, engine: Engine, budget: TokenBudget, tenants: dict[str, Tenant]) -> None:
        self.engine = engine
        self.budget = budget
        self.tenants = tenants
        self._reserve: Grant | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        self._reserve = await self.budget.acquire(self.budget.total // 50)  # clean: kept for health checks and released by stop()

    async def stop(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10)
        for task in list(self._tasks):
            task.cancel()
        if self._reserve is not None:
            self._reserve.release()
            self._reserve = None

    async def handle(self, req: Request) -> Response:
        tenant = self.tenants[req.tenant]
        await tenant.gate.acquire()  # leak: the oversized request is answered with the gate held
        try:
            grant = await asyncio.wait_for(self.budget.acquire(req.cost), timeout=2.0)  # clean: released by the finally at the end
        except asyncio.TimeoutError:
            tenant.gate.release()
            return Response(429, "busy")
        except Oversized:
            log.info("%s asked for %d tokens", req.tenant, req.cost)
            return Response(413, "prompt too long")
        try:
            return Response(200, await self.engine.generate(req))
        finally:
            grant.release()
            tenant.gate.release()
            tenant.served += 1

    async def stream(self, req: Request) -> AsyncIterator[str]:
        gate = self.tenants[req.tenant].gate
        entered = False
        try:
            if gate.locked():
                yield "[queued]"
            await gate.acquire()  # clean: near miss, the flag is set at once and the finally looks at it
            entered = True
            async with self.budget.hold(req.cost):  # clean: the context manager releases
                async for tok in self.engine.tokens(req):
                    yield tok
        finally:
            if entered:
                gate.release()

    async def first_words(self, req: Request, count: int) -> list[str]:
        words: list[str] = []
        async with aclosing(self.stream(req)) as tokens:
            async for tok in tokens:
                words.append(tok)
                if len(words) >= count:
                    break
        return words

    async def with_top_up(self, req: Request) -> str:
        grant = await self.budget.acquire(req.cost)  # leak: bound again by the top-up, the first tokens are not put back
        text = await self.engine.generate(req)
        used = self.engine.count(text)
        if used > req.cost:
            log.debug("top-up of %d", used - req.cost)
            grant = await self.budget.acquire(used - req.cost)  # clean: released below
        grant.release()
        return text

    async def submit_group(self, reqs: list[Request]) -> list[Response]:
        grants = await asyncio.gather(*(self.budget.acquire(r.cost) for r in reqs), return_exceptions=True)  # leak: one oversized member returns early, the grants of the others stay out
        if any(isinstance(g, Oversized) for g in grants):
            return [Response(413) for _ in reqs]
        try:
            texts = await asyncio.gather(*(self.engine.generate(r) for r in reqs))
        finally:
            for g in grants:
                g.release()
        return [Response(200, t) for t in texts]

    async def submit_background(self, req: Request) -> asyncio.Task[str]:
        grant = await self.budget.acquire(req.cost)  # clean: near miss, the done callback of the task releases it, also when cancelled
        task = asyncio.create_task(self.engine.generate(req))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _t: grant.release())
        return task

    async def with_retries(self, req: Request, tries: int = 3) -> Response:
        for attempt in range(tries):
            grant = await self.budget.acquire(req.cost)  # leak: after Overloaded the loop goes on without releasing
            try:
                text = await self.engine.generate(req)
            except Overloaded:
                await asyncio.sleep(2 ** attempt + random.random())
                continue
            grant.release()
            return Response(200, text)
        return Response(503, "overloaded")

    async def probe(self) -> bool:
        grant = await self.budget.acquire(1)  # clean: both outcomes pass the finally
        try:
            await self.engine.generate(Request("probe", "ping", 1))
        except Overloaded:
            return False
        finally:
            grant.release()
        return True
