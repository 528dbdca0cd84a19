"""Admission control of an asyncio serving frontend."""
from __future__ import annotations

import asyncio
import itertools
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

logger = logging.getLogger("frontend")


class TokenBudget:
    """Budget of tokens in flight. claim() blocks, try_claim() does not; refund() gives back."""

    def __init__(self, total: int):
        self.total = total
        self.used = 0
        self._changed = asyncio.Condition()

    async def claim(self, n: int) -> int:
        async with self._changed:
            await self._changed.wait_for(lambda: self.used + n <= self.total)
            self.used += n
        return n

    def try_claim(self, n: int) -> int:
        if self.used + n > self.total:
            return 0
        self.used += n
        return n

    async def refund(self, n: int) -> None:
        async with self._changed:
            self.used -= n
            self._changed.notify_all()


class SlotSemaphore:
    def __init__(self, n: int):
        self._sem = asyncio.Semaphore(n)

    async def enter(self) -> None:
        await self._sem.acquire()  # clean: given to the caller of enter, leave releases

    def leave(self) -> None:
        self._sem.release()


@dataclass
class Request:
    rid: int
    prompt: list[int]
    max_tokens: int
    claimed: int = 0
    out: asyncio.Queue = field(default_factory=asyncio.Queue)
    cancelled: bool = False


class Frontend:
    def __init__(self, engine, budget: TokenBudget, slots: SlotSemaphore):
        self.engine = engine
        self.budget = budget
        self.slots = slots
        self.live: dict[int, Request] = {}
        self.parked: dict[int, Request] = {}
        self._ids = itertools.count()

    async def generate(self, prompt: list[int], max_tokens: int):
        """Stream the tokens of one request."""
        req = Request(next(self._ids), prompt, max_tokens)
        req.claimed = await self.budget.claim(len(prompt) + max_tokens)  # clean: _finish in the finally refunds
        self.live[req.rid] = req
        try:
            await self.engine.add(req)
            while True:
                token = await req.out.get()
                if token is None:
                    break
                yield token
        finally:
            await self._finish(req)

    async def _finish(self, req: Request) -> None:
        self.live.pop(req.rid, None)
        if req.claimed:
            await self.budget.refund(req.claimed)
            req.claimed = 0

    async def complete(self, prompt: list[int], max_tokens: int) -> list[int]:
        need = len(prompt) + max_tokens
        await self.slots.enter()  # clean: leave in the finally
        try:
            await self.budget.claim(need)  # leak: the return for an empty answer does not refund
            tokens = await self.engine.run(prompt, max_tokens)
            if not tokens:
                return []
            await self.budget.refund(need)
            return tokens
        finally:
            self.slots.leave()

    async def score(self, prompts: list[list[int]]) -> list[float]:
        scores = []
        for prompt in prompts:
            await self.slots.enter()  # leak: continue for an empty prompt skips leave
            if not prompt:
                scores.append(0.0)
                continue
            scores.append(await self.engine.score(prompt))
            self.slots.leave()
        return scores

    async def park(self, prompt: list[int], max_tokens: int) -> int:
        """Claim the budget now and start later."""
        req = Request(next(self._ids), prompt, max_tokens)
        req.claimed = await self.budget.claim(len(prompt) + max_tokens)  # leak: abandon() does not refund
        self.parked[req.rid] = req
        return req.rid

    async def resume(self, rid: int) -> list[int]:
        req = self.parked.pop(rid)
        try:
            return await self.engine.run(req.prompt, req.max_tokens)
        finally:
            await self._finish(req)

    def abandon(self, rid: int) -> None:
        req = self.parked.pop(rid, None)
        if req is not None:
            req.cancelled = True
            logger.info("request %d abandoned", rid)

    @asynccontextmanager
    async def admitted(self, n: int):
        await self.slots.enter()  # clean: leave in the finally
        got = 0
        try:
            got = self.budget.try_claim(n)  # clean: near miss, refunded in the finally if anything was claimed
            yield got
        finally:
            if got:
                await self.budget.refund(got)
            self.slots.leave()

    async def tokenize_and_count(self, text: str) -> int:
        async with self.admitted(len(text) // 4) as got:  # clean: the manager gives both back
            if not got:
                return -1
            return len(await self.engine.tokenize(text))

    def spawn(self, prompt: list[int], max_tokens: int) -> asyncio.Task | None:
        got = self.budget.try_claim(len(prompt) + max_tokens)  # clean: near miss, the task's done callback refunds
        if not got:
            return None
        task = asyncio.create_task(self.engine.run(prompt, max_tokens))
        task.add_done_callback(lambda _: asyncio.ensure_future(self.budget.refund(got)))
        return task

    def spawn_warm(self, prompt: list[int]) -> asyncio.Task | None:
        got = self.budget.try_claim(len(prompt))  # leak: the task's callback only logs, no one refunds
        if not got:
            return None
        task = asyncio.create_task(self.engine.run(prompt, 1))
        task.add_done_callback(lambda t: logger.debug("warmed: %s", t.cancelled()))
        return task

    async def retry(self, prompt: list[int], max_tokens: int, attempts: int = 3) -> list[int] | None:
        need = len(prompt) + max_tokens
        for attempt in range(attempts):
            got = self.budget.try_claim(need)  # leak: after an empty result the loop claims again without refund
            if not got:
                await asyncio.sleep(0.05 * 2 ** attempt)
                continue
            result = await self.engine.run(prompt, max_tokens)
            if not result:
                logger.warning("attempt %d came back empty", attempt)
                continue
            await self.budget.refund(got)
            return result
        return None

    async def retry_slot(self, prompt: list[int], attempts: int = 3) -> list[int] | None:
        for attempt in range(attempts):
            await self.slots.enter()  # clean: near miss, the finally runs also on continue
            try:
                return await self.engine.run(prompt, 16)
            except ConnectionError:
                await asyncio.sleep(0.1 * attempt)
                continue
            finally:
                self.slots.leave()
        return None
