"""Token-budget admission in front of an upstream chat deployment."""
from __future__ import annotations

import asyncio
import itertools
import logging
import time
from dataclasses import dataclass
from typing import AsyncIterator, Dict, List, Optional, Tuple

log = logging.getLogger("gateway")


class Overloaded(Exception):
    pass


class UpstreamBusy(Exception):
    pass


class TokenBudget:
    """Counts tokens in flight; a ticket stands for the tokens of one call."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._in_use = 0
        self._ids = itertools.count(1)
        self._tickets: Dict[int, int] = {}
        self._settled = asyncio.Event()

    @property
    def in_use(self) -> int:
        return self._in_use

    def reserve(self, tokens: int) -> Optional[int]:
        if self._in_use + tokens > self.capacity:
            return None
        ticket = next(self._ids)
        self._tickets[ticket] = tokens
        self._in_use += tokens
        return ticket

    def settle(self, ticket: int) -> None:
        self._in_use -= self._tickets.pop(ticket)
        self._settled.set()

    async def reserve_wait(self, tokens: int, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while True:
            ticket = self.reserve(tokens)  # clean: near miss, rebinding in the loop happens only when None came back
            if ticket is not None:
                return ticket
            left = deadline - time.monotonic()
            if left <= 0:
                raise Overloaded(f"{tokens} tokens after {timeout}s")
            self._settled.clear()
            try:
                await asyncio.wait_for(self._settled.wait(), left)
            except asyncio.TimeoutError:
                continue


@dataclass
class ChatRequest:
    rid: str
    prompt: str
    max_tokens: int
    stop: str = "\n\n"
    ticket: Optional[int] = None

    @property
    def cost(self) -> int:
        return len(self.prompt.split()) + self.max_tokens


class Upstream:
    def __init__(self, replies: Dict[str, List[str]]) -> None:
        self._replies = replies

    async def generate(self, req: ChatRequest) -> str:
        await asyncio.sleep(0)
        pieces = self._replies.get(req.rid)
        if pieces is None:
            raise UpstreamBusy(req.rid)
        return "".join(pieces)

    async def stream(self, req: ChatRequest) -> AsyncIterator[str]:
        for piece in self._replies.get(req.rid, []):
            await asyncio.sleep(0)
            yield piece


class Gateway:
    def __init__(self, primary: Upstream, spare: Upstream, budget: TokenBudget, spare_budget: TokenBudget) -> None:
        self.primary = primary
        self.spare = spare
        self.budget = budget
        self.spare_budget = spare_budget
        self.inflight: Dict[str, ChatRequest] = {}

    async def complete(self, req: ChatRequest) -> str:
        ticket = self.budget.reserve(req.cost)  # clean: None-checked, settled in finally
        if ticket is None:
            raise Overloaded(req.rid)
        try:
            return await self.primary.generate(req)
        finally:
            self.budget.settle(ticket)

    async def complete_with_retry(self, req: ChatRequest, attempts: int = 3) -> str:
        for attempt in range(attempts):
            ticket = await self.budget.reserve_wait(req.cost, 5.0)  # leak: UpstreamBusy is caught, continue skips the settle
            try:
                text = await self.primary.generate(req)
            except UpstreamBusy:
                log.info("%s: attempt %d busy", req.rid, attempt)
                await asyncio.sleep(0.001 * 2 ** attempt)
                continue
            self.budget.settle(ticket)
            return text
        raise Overloaded(req.rid)

    async def complete_with_fallback(self, req: ChatRequest) -> str:
        ticket = await self.budget.reserve_wait(req.cost, 1.0)  # clean: near miss, settled in except and in else
        try:
            text = await self.primary.generate(req)
        except UpstreamBusy:
            self.budget.settle(ticket)
        else:
            self.budget.settle(ticket)
            return text
        spare = self.spare_budget.reserve(req.cost)  # clean: settled in finally
        if spare is None:
            raise Overloaded(req.rid)
        try:
            return await self.spare.generate(req)
        finally:
            self.spare_budget.settle(spare)

    async def stream(self, req: ChatRequest) -> AsyncIterator[str]:
        ticket = await self.budget.reserve_wait(req.cost, 1.0)  # clean: near miss, generator left early but under finally
        try:
            async for piece in self.primary.stream(req):
                if req.stop in piece:
                    return
                yield piece
        finally:
            self.budget.settle(ticket)

    async def collect(self, req: ChatRequest, limit: int) -> str:
        ticket = await self.budget.reserve_wait(req.cost, 1.0)  # leak: return inside the loop when the stop string shows up
        out: List[str] = []
        async for piece in self.primary.stream(req):
            if req.stop in piece:
                out.append(piece.split(req.stop)[0])
                return "".join(out)
            out.append(piece)
            if len(out) >= limit:
                break
        self.budget.settle(ticket)
        return "".join(out)

    def admit_pair(self, a: ChatRequest, b: ChatRequest) -> Optional[Tuple[int, int]]:
        first = self.budget.reserve(a.cost)  # leak: second refused, None returned without settling this one
        if first is None:
            return None
        second = self.spare_budget.reserve(b.cost)  # clean: returned to the caller with the first
        if second is None:
            log.warning("pair %s/%s refused", a.rid, b.rid)
            return None
        return first, second

    async def run_pair(self, a: ChatRequest, b: ChatRequest) -> List[object]:
        pair = self.admit_pair(a, b)  # clean: both settled in finally
        if pair is None:
            raise Overloaded(a.rid)
        try:
            return await asyncio.gather(self.primary.generate(a), self.spare.generate(b), return_exceptions=True)
        finally:
            self.budget.settle(pair[0])
            self.spare_budget.settle(pair[1])

    def enqueue(self, req: ChatRequest) -> bool:
        req.ticket = self.budget.reserve(req.cost)  # leak: cancel() drops the request from the table and forgets its ticket
        if req.ticket is None:
            return False
        self.inflight[req.rid] = req
        return True

    def finish(self, rid: str) -> None:
        req = self.inflight.pop(rid)
        if req.ticket is not None:
            self.budget.settle(req.ticket)
            req.ticket = None

    def cancel(self, rid: str) -> bool:
        req = self.inflight.pop(rid, None)
        if req is None:
            return False
        log.info("cancelled %s (%d tokens)", rid, req.cost)
        return True

    async def hedge(self, req: ChatRequest, delay: float) -> str:
        ticket = await self.budget.reserve_wait(2 * req.cost, 1.0)  # clean: done callback of the waiter settles
        waiter = asyncio.ensure_future(self._race(req, delay))
        waiter.add_done_callback(lambda _fut, t=ticket: self.budget.settle(t))
        return await waiter

    async def _race(self, req: ChatRequest, delay: float) -> str:
        tasks = [asyncio.create_task(self.primary.generate(req)), asyncio.create_task(self.spare.generate(req))]
        done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=delay)
        for task in rest:
            task.cancel()
        return next(iter(done)).result()


async def main() -> None:
    up = Upstream({"a": ["hello ", "there", "\n\n"], "b": ["hi"]})
    gw = Gateway(up, up, TokenBudget(100), TokenBudget(100))
    a, b = ChatRequest("a", "one two", 8), ChatRequest("b", "three", 8)
    print(await gw.complete(a), await gw.complete_with_fallback(b))
    print([p async for p in gw.stream(a)], await gw.collect(b, 4))
    print(await gw.run_pair(a, b), await gw.hedge(b, 1.0))
    gw.enqueue(a)
    gw.finish("a")
    print(gw.budget.in_use, gw.spare_budget.in_use)


if __name__ == "__main__":
    asyncio.run(main())
