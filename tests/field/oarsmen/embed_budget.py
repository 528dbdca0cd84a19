"""Shapes the traffic of an embedding service: token budget per tenant, request permits, micro-batching."""
from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import Awaitable, Callable, Dict, List, Optional, Sequence

logger = logging.getLogger("embed.budget")

Encoder = Callable[[Sequence[str]], Awaitable[List[List[float]]]]


class OverBudget(Exception):
    def __init__(self, tenant: str, wanted: int) -> None:
        super().__init__(f"{tenant}: {wanted} tokens are more than the tenant may ever hold")


class Rejected(Exception): ...


class Grant:
    """So many tokens of a tenant's budget. cancel() and settle() hand them back, once."""

    __slots__ = ("budget", "tokens", "open")

    def __init__(self, budget: "TokenBudget", tokens: int) -> None:
        self.budget, self.tokens = budget, tokens
        self.open = True

    def cancel(self) -> None:
        if self.open:
            self.open = False
            self.budget.credit(self.tokens)

    def settle(self, used: int) -> None:
        if self.open:
            self.open = False
            self.budget.spent += used
            self.budget.credit(self.tokens)

    def shrink(self, tokens: int) -> None:
        give, self.tokens = self.tokens - tokens, tokens
        self.budget.credit(give)


class TokenBudget:
    def __init__(self, tenant: str, total: int) -> None:
        self.tenant = tenant
        self.total = total
        self.left = total
        self.spent = 0
        self._waiters: List[tuple] = []

    def try_reserve(self, tokens: int) -> Optional[Grant]:
        if tokens > self.left or self._waiters:
            return None
        self.left -= tokens
        return Grant(self, tokens)

    async def reserve(self, tokens: int) -> Grant:
        if tokens > self.total:
            raise OverBudget(self.tenant, tokens)
        grant = self.try_reserve(tokens)  # clean: returned when there is one
        if grant is not None:
            return grant
        fut = asyncio.get_running_loop().create_future()
        self._waiters.append((tokens, fut))
        return await fut

    def credit(self, tokens: int) -> None:
        self.left += tokens
        while self._waiters and self._waiters[0][0] <= self.left:
            wanted, fut = self._waiters.pop(0)
            if fut.cancelled():
                continue
            self.left -= wanted
            fut.set_result(Grant(self, wanted))


def estimate(texts: Sequence[str]) -> int:
    return sum(len(t) // 4 + 2 for t in texts)


@dataclass
class Work:
    texts: List[str]
    grant: Grant
    result: "asyncio.Future" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def fail(self, exc: BaseException) -> None:
        self.grant.cancel()
        if not self.result.done():
            self.result.set_exception(exc)


class MicroBatcher:
    """Every piece of Work in the inbox carries its grant; the batcher settles it or fails it."""

    def __init__(self, encode: Encoder, max_texts: int = 64, linger: float = 0.01) -> None:
        self.encode = encode
        self.max_texts, self.linger = max_texts, linger
        self.inbox: "asyncio.Queue[Work]" = asyncio.Queue()
        self.closed = False

    def submit(self, work: Work) -> "asyncio.Future":
        if self.closed:
            work.fail(Rejected("batcher is closed"))
        else:
            self.inbox.put_nowait(work)
        return work.result

    async def _collect(self) -> List[Work]:
        batch = [await self.inbox.get()]
        deadline = time.monotonic() + self.linger
        while sum(len(w.texts) for w in batch) < self.max_texts:
            wait = deadline - time.monotonic()
            if wait <= 0:
                break
            try:
                batch.append(await asyncio.wait_for(self.inbox.get(), wait))
            except asyncio.TimeoutError:
                break
        return batch

    async def run(self) -> None:
        while not (self.closed and self.inbox.empty()):
            batch = await self._collect()
            flat = [t for w in batch for t in w.texts]
            try:
                vectors = await self.encode(flat)
            except (RuntimeError, ConnectionError) as exc:
                for w in batch:
                    w.fail(exc)
                continue
            at = 0
            for w in batch:
                w.grant.settle(estimate(w.texts))
                if not w.result.done():
                    w.result.set_result(vectors[at:at + len(w.texts)])
                at += len(w.texts)


class Frontend:
    def __init__(self, batcher: MicroBatcher, encode: Encoder, budgets: Dict[str, TokenBudget], width: int = 128) -> None:
        self.batcher = batcher
        self.encode = encode
        self.budgets = budgets
        self.permits = asyncio.Semaphore(width)
        self.bulk: Dict[str, Grant] = {}
        self.cache: Dict[str, List[float]] = {}
        self.served = 0

    async def embed(self, tenant: str, texts: List[str]) -> List[List[float]]:
        grant = await self.budgets[tenant].reserve(estimate(texts))  # clean: near miss, travels with the Work, the batcher settles or fails it
        work = Work(texts, grant)
        return await self.batcher.submit(work)

    async def embed_cached(self, tenant: str, texts: List[str]) -> List[List[float]]:
        budget = self.budgets[tenant]
        grant = await budget.reserve(estimate(texts))  # leak: when every text is in the cache the grant is not cancelled before the return
        missing = [t for t in texts if t not in self.cache]
        if not missing:
            return [self.cache[t] for t in texts]
        grant.shrink(estimate(missing))
        vectors = await self.batcher.submit(Work(missing, grant))
        self.cache.update(zip(missing, vectors))
        return [self.cache[t] for t in texts]

    async def embed_direct(self, tenant: str, texts: List[str]) -> List[List[float]]:
        """Past the batcher, for texts that fill a batch on their own."""
        await self.permits.acquire()  # leak: OverBudget from the reservation leaves with the permit, the try begins only below
        grant = await self.budgets[tenant].reserve(estimate(texts))  # clean: settled or cancelled, the finally cancels what is still open
        try:
            vectors = await self.encode(texts)
            grant.settle(estimate(texts))
            return vectors
        finally:
            grant.cancel()
            self.permits.release()

    async def embed_patiently(self, tenant: str, texts: List[str], tries: int = 4) -> List[List[float]]:
        pause = 0.1
        for attempt in range(tries):
            async with self.permits:  # clean: async with
                grant = self.budgets[tenant].try_reserve(estimate(texts))  # clean: near miss, None on the way to the next attempt, otherwise settled or cancelled
                if grant is not None:
                    try:
                        vectors = await self.encode(texts)
                    except (RuntimeError, ConnectionError) as exc:
                        logger.info("attempt %d: %s", attempt, exc)
                        grant.cancel()
                    else:
                        grant.settle(estimate(texts))
                        return vectors
            await asyncio.sleep(pause)
            pause *= 2
        raise Rejected(f"{tenant}: no luck in {tries} tries")

    async def begin_bulk(self, tenant: str, job: str, tokens: int) -> None:
        """Reserve the budget of a whole bulk job ahead of time."""
        self.bulk[job] = await self.budgets[tenant].reserve(tokens)  # leak: a job that is begun again overwrites the grant of its first beginning

    async def bulk_part(self, job: str, texts: List[str]) -> List[List[float]]:
        if job not in self.bulk:
            raise KeyError(job)
        async with self.permits:  # clean: async with
            return await self.encode(texts)

    def end_bulk(self, job: str, used: int) -> None:
        grant = self.bulk.pop(job, None)
        if grant is not None:
            grant.settle(used)

    async def embed_within(self, tenant: str, texts: List[str], seconds: float) -> Optional[List[List[float]]]:
        grant = await self.budgets[tenant].reserve(estimate(texts))  # leak: the handler of the timeout returns None without cancelling the grant
        try:
            vectors = await asyncio.wait_for(self.encode(texts), seconds)
        except asyncio.TimeoutError:
            logger.warning("%s: %d texts not embedded in %.1fs", tenant, len(texts), seconds)
            return None
        except (RuntimeError, ConnectionError):
            grant.cancel()
            raise
        grant.settle(estimate(texts))
        return vectors

    async def embed_pair(self, left: str, right: str, texts: List[str]) -> List[List[float]]:
        """Two tenants share the cost of a joint query."""
        half = estimate(texts) // 2 + 1
        async with contextlib.AsyncExitStack() as stack:
            for tenant in (left, right):
                grant = await self.budgets[tenant].reserve(half)  # clean: cancelled by the stack, also when the second one is refused
                stack.callback(grant.cancel)
            return await self.encode(texts)

    def fire(self, tenant: str, texts: List[str], on_vectors: Callable[[List[List[float]]], None]) -> bool:
        """Fire and forget; the callback gets the vectors some time later."""
        grant = self.budgets[tenant].try_reserve(estimate(texts))  # leak: the done callback returns on a failed encode before it settles
        if grant is None:
            return False
        task = asyncio.ensure_future(self.encode(texts))

        def finished(t: "asyncio.Task") -> None:
            if t.cancelled() or t.exception() is not None:
                logger.warning("background encode for %s failed", tenant)
                return
            grant.settle(estimate(texts))
            self.served += 1
            on_vectors(t.result())

        task.add_done_callback(finished)
        return True

    async def close(self) -> None:
        self.batcher.closed = True
        for job in list(self.bulk):
            self.end_bulk(job, 0)
