"""Async admission control of an OpenAI-compatible gateway."""
from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, AsyncIterator, Awaitable, Callable, Deque, Dict, List, Optional

logger = logging.getLogger(__name__)


class TokenBudget:
    """Counts tokens in flight; waiters are served first come, first served."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiters: Deque["asyncio.Future[None]"] = deque()

    def try_reserve(self, n: int) -> bool:
        if self.used + n > self.limit:
            return False
        self.used += n
        return True

    async def reserve(self, n: int) -> None:
        while not self.try_reserve(n):  # clean: near miss, loops until it got them and leaves them to the caller
            fut: "asyncio.Future[None]" = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            await fut

    def refund(self, n: int) -> None:
        self.used -= n
        while self._waiters:
            fut = self._waiters.popleft()
            if not fut.done():
                fut.set_result(None)


@dataclass
class Ticket:
    model: str
    tokens: int
    issued: float
    closed: bool = False


class UpstreamError(RuntimeError):
    pass


Handler = Callable[[Dict[str, Any]], Awaitable[Dict[str, Any]]]


class Gateway:
    def __init__(self, backends: Dict[str, Handler], budget: TokenBudget, per_model: int = 8) -> None:
        self.backends = backends
        self.budget = budget
        self.slots: Dict[str, asyncio.Semaphore] = {m: asyncio.Semaphore(per_model) for m in backends}
        self.tickets: Dict[str, Ticket] = {}
        self._tasks: List["asyncio.Task[None]"] = []

    async def issue(self, model: str, tokens: int) -> Ticket:
        await self.budget.reserve(tokens)  # clean: near miss, refunded when the slot wait is cancelled, else in the ticket
        try:
            await self.slots[model].acquire()  # clean: handed on inside the ticket, close gives it back
        except asyncio.CancelledError:
            self.budget.refund(tokens)
            raise
        return Ticket(model, tokens, time.monotonic())

    def close(self, ticket: Ticket) -> None:
        if ticket.closed:
            return
        ticket.closed = True
        self.slots[ticket.model].release()
        self.budget.refund(ticket.tokens)

    @asynccontextmanager
    async def admitted(self, model: str, tokens: int) -> AsyncIterator[Ticket]:
        ticket = await self.issue(model, tokens)  # clean: near miss, closed in finally also when the body is cancelled
        try:
            yield ticket
        finally:
            self.close(ticket)

    async def complete(self, request: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        model, tokens = request["model"], request.get("max_tokens", 256)
        ticket = await self.issue(model, tokens)  # leak: the handled timeout returns None with the ticket still open
        try:
            response = await asyncio.wait_for(self.backends[model](request), timeout=60.0)
        except asyncio.TimeoutError:
            logger.warning("%s timed out", model)
            return None
        except UpstreamError:
            self.close(ticket)
            return None
        self.close(ticket)
        return response

    async def complete_scoped(self, request: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        async with self.admitted(request["model"], request.get("max_tokens", 256)):  # clean: near miss, the context closes it on both returns
            try:
                return await self.backends[request["model"]](request)
            except UpstreamError:
                return None

    async def embed_many(self, model: str, inputs: List[str]) -> List[Dict[str, Any]]:
        results: List[Dict[str, Any]] = []
        for text in inputs:
            await self.slots[model].acquire()  # leak: blank inputs continue without release
            if not text.strip():
                results.append({"embedding": []})
                continue
            try:
                results.append(await self.backends[model]({"input": text}))
            finally:
                self.slots[model].release()
        return results

    async def score_many(self, model: str, pairs: List[Dict[str, Any]]) -> List[float]:
        scores: List[float] = []
        for pair in pairs:
            if "query" not in pair:
                scores.append(0.0)
                continue
            await self.slots[model].acquire()  # clean: near miss, the continue stands before and the finally after
            try:
                reply = await self.backends[model](pair)
                if reply.get("stop"):
                    break
                scores.append(float(reply["score"]))
            finally:
                self.slots[model].release()
        return scores

    async def speculative(self, request: Dict[str, Any], fast: str, slow: str) -> Dict[str, Any]:
        await self.slots[fast].acquire()  # leak: when the slow model is busy the fallback returns without release
        if self.slots[slow].locked():
            return await self.backends[fast](request)
        await self.slots[slow].acquire()  # clean: near miss, released in the finally with the other one
        try:
            draft = await self.backends[fast](request)
            return await self.backends[slow]({**request, "draft": draft})
        finally:
            self.slots[slow].release()
            self.slots[fast].release()

    async def open_stream(self, key: str, model: str, tokens: int) -> Ticket:
        ticket = await self.issue(model, tokens)  # leak: a stream reopened under its key overwrites the open ticket
        self.tickets[key] = ticket
        return ticket

    def end_stream(self, key: str) -> None:
        ticket = self.tickets.pop(key, None)
        if ticket is not None:
            self.close(ticket)

    async def _run_detached(self, ticket: Ticket, request: Dict[str, Any]) -> None:
        try:
            await self.backends[ticket.model](request)
        except asyncio.CancelledError:
            logger.info("detached request cancelled")

    async def submit_detached(self, request: Dict[str, Any]) -> None:
        ticket = await self.issue(request["model"], request["max_tokens"])  # clean: near miss, the done callback of the task closes it
        task = asyncio.create_task(self._run_detached(ticket, request))
        task.add_done_callback(lambda _: self.close(ticket))
        self._tasks.append(task)

    def try_batch(self, sizes: List[int]) -> int:
        granted = 0
        for n in sizes:
            if not self.budget.try_reserve(n):  # clean: near miss, the sum of what was granted is refunded below
                break
            granted += n
        count = granted
        if granted:
            self.budget.refund(granted)
        return count

    async def shutdown(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for key in list(self.tickets):
            self.end_stream(key)
