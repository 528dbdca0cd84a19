"""Tokens-per-minute budget for calls of a hosted model.

A call reserves what it may use at most (prompt + max_tokens) and settles with
what it really used.  A hold that was not settled counts against the budget.
"""
from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections import Counter
from typing import Any, AsyncIterator, Awaitable, Callable, NamedTuple

log = logging.getLogger(__name__)

Client = Any
stats: Counter[str] = Counter()


class RateLimited(Exception):
    def __init__(self, after: float) -> None:
        super().__init__(f"retry after {after}s")
        self.after = after


class BudgetExceeded(Exception):
    pass


class Hold(NamedTuple):
    tokens: int
    tag: str


class Meter:
    def __init__(self, per_minute: int, hard_cap: int, parallel: int = 8) -> None:
        self.per_minute = per_minute
        self.hard_cap = hard_cap
        self.spent = 0
        self._left = per_minute
        self._cond = asyncio.Condition()
        self._lanes = asyncio.Semaphore(parallel)

    async def reserve(self, tokens: int, tag: str = "") -> Hold:
        if self.spent + tokens > self.hard_cap:
            raise BudgetExceeded(f"{self.spent} spent, {tokens} asked, cap {self.hard_cap}")
        async with self._cond:
            await self._cond.wait_for(lambda: self._left >= tokens)
            self._left -= tokens
        return Hold(tokens, tag)

    async def settle(self, hold: Hold, used: int = 0) -> None:
        async with self._cond:
            self.spent += used
            self._left += hold.tokens
            self._cond.notify_all()

    async def in_lane(self, fn: Callable[[], Awaitable[Any]]) -> Any:
        await self._lanes.acquire()  # clean: the finally
        try:
            return await fn()
        finally:
            self._lanes.release()

    async def try_lane(self, fn: Callable[[], Awaitable[Any]]) -> Any | None:
        """None when all lanes are taken."""
        if self._lanes.locked():
            return None
        await self._lanes.acquire()  # leak: a RateLimited is turned into None without the release
        try:
            result = await fn()
        except RateLimited as exc:
            stats["lane_limited"] += 1
            log.debug("lane: %s", exc)
            return None
        self._lanes.release()
        return result


def count_tokens(text: str) -> int:
    return len(text) // 4 + 1


def backoff(tries: int):
    """Decorator: call again after RateLimited."""

    def wrap(fn):
        @functools.wraps(fn)
        async def inner(*args, **kwargs):
            for n in range(tries):
                try:
                    return await fn(*args, **kwargs)
                except RateLimited as exc:
                    stats["retries"] += 1
                    if n == tries - 1:
                        raise
                    await asyncio.sleep(exc.after * random.uniform(1.0, 1.5))

        return inner

    return wrap


@backoff(tries=4)
async def complete(client: Client, meter: Meter, prompt: str, max_tokens: int = 512) -> str:
    hold = await meter.reserve(count_tokens(prompt) + max_tokens, "complete")  # leak: RateLimited flies to the decorator, which calls again; each attempt takes another hold
    reply = await client.create(prompt=prompt, max_tokens=max_tokens)
    if reply.status == 429:
        raise RateLimited(reply.retry_after)
    await meter.settle(hold, reply.usage)
    return reply.text


@backoff(tries=4)
async def classify(client: Client, meter: Meter, prompt: str, labels: list[str]) -> str:
    hold = await meter.reserve(count_tokens(prompt) + 4, "classify")  # clean: near miss, also retried by the decorator but settled by the finally each time
    used = 0
    try:
        reply = await client.create(prompt=prompt, max_tokens=4, choices=labels)
        if reply.status == 429:
            raise RateLimited(reply.retry_after)
        used = reply.usage
        return reply.text.strip()
    finally:
        await meter.settle(hold, used)


async def stream_complete(client: Client, meter: Meter, prompt: str, on_usage: Callable[[int], Awaitable[None]]) -> AsyncIterator[str]:
    """on_usage is called with the number of tokens that the reply had."""
    n = 0
    async for event in client.stream(prompt=prompt):
        if event.finish_reason == "length":
            stats["cut"] += 1
            yield "…"
            return
        if event.finish_reason == "stop":
            break
        n += 1
        yield event.text
    await on_usage(n)


async def tell(client: Client, meter: Meter, prompt: str, sink: Callable[[str], None]) -> None:
    hold = await meter.reserve(count_tokens(prompt) + 2048, "tell")  # leak: stream_complete does not call on_usage when the reply is cut by length
    async for text in stream_complete(client, meter, prompt, functools.partial(meter.settle, hold)):
        sink(text)


async def judge_pair(client: Client, meter: Meter, question: str, a: str, b: str) -> tuple[float, float]:
    """Score both answers; the two calls run side by side."""
    hold_a = await meter.reserve(count_tokens(question + a) + 16, "judge")  # leak: BudgetExceeded of the second reserve leaves before the try
    hold_b = await meter.reserve(count_tokens(question + b) + 16, "judge")  # clean: the finally
    try:
        replies = await asyncio.gather(
            client.create(prompt=f"{question}\n---\n{a}", max_tokens=16),
            client.create(prompt=f"{question}\n---\n{b}", max_tokens=16),
        )
        first, second = (float(r.text or 0) for r in replies)
        return first, second
    finally:
        await meter.settle(hold_a, 16)
        await meter.settle(hold_b, 16)


async def agent(client: Client, meter: Meter, task: str, tools: dict[str, Callable[[str], str]], turns: int = 12) -> str:
    """Loop of calls over a growing context; the hold grows with it."""
    context = task
    hold = await meter.reserve(count_tokens(context) + 1024, "agent")  # leak: the rebinding of the growing context drops this first hold
    for turn in range(turns):
        need = count_tokens(context) + 1024
        if need > hold.tokens:
            log.debug("turn %d: context grew to %d tokens", turn, need)
            hold = await meter.reserve(need * 2, "agent")  # leak: dropped in turn when the context doubles once more
        reply = await client.create(prompt=context, max_tokens=1024)
        name, _, arg = reply.text.partition(" ")
        if name == "final":
            await meter.settle(hold, count_tokens(context))
            return arg
        tool = tools.get(name)
        context += "\n" + (tool(arg) if tool else f"no tool {name}")
    await meter.settle(hold, count_tokens(context))
    return ""


async def summarise_all(client: Client, meter: Meter, texts: list[str]) -> list[str | None]:
    async def one(text: str) -> str | None:
        try:
            hold = await meter.reserve(count_tokens(text) + 256, "map")  # clean: BudgetExceeded means there is no hold, else the finally
        except BudgetExceeded:
            stats["skipped"] += 1
            return None
        try:
            return (await client.create(prompt=text, max_tokens=256)).text
        except RateLimited:
            return None
        finally:
            await meter.settle(hold, 256)

    return await asyncio.gather(*(meter.in_lane(lambda t=t: one(t)) for t in texts))


async def reserve_for(meter: Meter, prompts: list[str], each: int) -> list[Hold]:
    """One hold per prompt, all of them or an exception."""
    holds: list[Hold] = []
    try:
        for prompt in prompts:
            holds.append(await meter.reserve(count_tokens(prompt) + each, "batch"))  # clean: near miss, given back by the except, else returned
    except BudgetExceeded:
        for hold in holds:
            await meter.settle(hold)
        raise
    return holds


async def batch(client: Client, meter: Meter, prompts: list[str]) -> str:
    holds = await reserve_for(meter, prompts, 64)  # clean: all settled by the loop in the finally
    done = 0
    try:
        handle = await client.submit_batch(prompts)
        done = 64
        return handle.id
    finally:
        for hold in holds:
            await meter.settle(hold, done)
