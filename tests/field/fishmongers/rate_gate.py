"""Client side admission for hosted model APIs: tokens per minute and requests in flight."""
from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


class Oversize(ValueError):
    """The request can never fit into the budget."""


class RateLimited(RuntimeError):
    def __init__(self, retry_after: float) -> None:
        super().__init__(f"retry after {retry_after}s")
        self.retry_after = retry_after


class Unparsable(ValueError):
    pass


@dataclass(eq=False)
class Reservation:
    id: int
    tokens: int
    started: float = field(default_factory=time.monotonic)


@dataclass
class Reply:
    text: str
    used: int


class TokenGate:
    """What reserve() hands out must come back through settle() or cancel()."""

    def __init__(self, per_minute: int, concurrency: int) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute)
        self._refilled = time.monotonic()
        self._slots = asyncio.Semaphore(concurrency)
        self._open: dict[int, Reservation] = {}
        self._ids = itertools.count()

    def _refill(self) -> None:
        now = time.monotonic()
        self._left = min(self._per_minute, self._left + (now - self._refilled) * self._per_minute / 60)
        self._refilled = now

    async def reserve(self, tokens: int) -> Reservation:
        await self._slots.acquire()  # leak: an oversized request raises with the slot taken
        if tokens > self._per_minute:
            raise Oversize(f"{tokens} > {self._per_minute}")
        self._refill()
        while self._left < tokens:
            await asyncio.sleep((tokens - self._left) * 60 / self._per_minute)
            self._refill()
        self._left -= tokens
        res = Reservation(next(self._ids), tokens)
        self._open[res.id] = res
        return res

    def settle(self, res: Reservation, used: int) -> None:
        if self._open.pop(res.id, None) is None:
            return
        self._left += max(0, res.tokens - used)
        self._slots.release()

    def cancel(self, res: Reservation) -> None:
        self.settle(res, 0)

    @property
    def in_flight(self) -> int:
        return len(self._open)


class Budgeted:
    """`async with Budgeted(gate, n) as b:` settles by what was noted in b.used."""

    def __init__(self, gate: TokenGate, tokens: int) -> None:
        self._gate = gate
        self._tokens = tokens
        self._res: Reservation | None = None
        self.used = 0

    async def __aenter__(self) -> Budgeted:
        self._res = await self._gate.reserve(self._tokens)  # clean: __aexit__ settles or cancels it
        return self

    async def __aexit__(self, exc_type: type | None, exc: object, tb: object) -> None:
        if exc_type is not None and self.used == 0:
            self._gate.cancel(self._res)
        else:
            self._gate.settle(self._res, self.used)


Call = Callable[[str], Awaitable[Reply]]


class Client:
    def __init__(self, gate: TokenGate, call: Call, chunks: Callable[[str], AsyncIterator[str]]) -> None:
        self._gate = gate
        self._call = call
        self._chunks = chunks
        self._memo: dict[str, str] = {}
        self._running: set[asyncio.Task[Reply]] = set()

    @staticmethod
    def estimate(prompt: str, answer: int = 256) -> int:
        return len(prompt) // 3 + answer

    async def complete(self, prompt: str, attempts: int = 4) -> str:
        for attempt in range(attempts):
            res = await self._gate.reserve(self.estimate(prompt))  # leak: a rate limited attempt is repeated without settling
            try:
                reply = await self._call(prompt)
            except RateLimited as exc:
                log.info("attempt %d: %s", attempt, exc)
                await asyncio.sleep(exc.retry_after)
                continue
            self._gate.settle(res, reply.used)
            return reply.text
        raise RateLimited(60.0)

    async def complete_cached(self, prompt: str) -> str:
        res = await self._gate.reserve(self.estimate(prompt))  # leak: a memo hit returns at once
        # looked up late, an equal prompt may have been answered while we waited
        if (text := self._memo.get(prompt)) is not None:
            return text
        used = res.tokens
        try:
            reply = await self._call(prompt)
            used = reply.used
        finally:
            self._gate.settle(res, used)
        self._memo[prompt] = reply.text
        return reply.text

    async def stream(self, prompt: str) -> AsyncIterator[str]:
        res = await self._gate.reserve(self.estimate(prompt))  # clean: near miss, the finally runs when the stream is closed, too
        seen = 0
        try:
            async for chunk in self._chunks(prompt):
                seen += 1
                yield chunk
        finally:
            self._gate.settle(res, len(prompt) // 3 + seen)

    async def spawn(self, prompt: str, on_reply: Callable[[Reply], None]) -> None:
        res = await self._gate.reserve(self.estimate(prompt))  # leak: the done callback leaves early when abort() has cancelled the task

        def done(task: asyncio.Task[Reply]) -> None:
            self._running.discard(task)
            if task.cancelled():
                return
            if task.exception() is not None:
                self._gate.cancel(res)
                return
            self._gate.settle(res, task.result().used)
            on_reply(task.result())

        task = asyncio.ensure_future(self._call(prompt))
        self._running.add(task)
        task.add_done_callback(done)

    def abort(self) -> None:
        for task in list(self._running):
            task.cancel()

    async def many(self, prompts: list[str]) -> list[str]:
        async def one(prompt: str, res: Reservation) -> str:
            try:
                return (await self._call(prompt)).text
            finally:
                self._gate.settle(res, res.tokens)

        tasks = []
        for prompt in prompts:
            size = min(self.estimate(prompt), 4096)
            try:
                res = await self._gate.reserve(size)  # clean: near miss, one() owns and settles it, Oversize means there is none
            except Oversize:
                continue
            tasks.append(asyncio.create_task(one(prompt, res)))
        return list(await asyncio.gather(*tasks))


class Conversation:
    """Keeps one reservation over a whole dialogue, enlarged when needed."""

    def __init__(self, gate: TokenGate, call: Call, window: int = 2048) -> None:
        self._gate = gate
        self._call = call
        self._window = window
        self._res: Reservation | None = None
        self._log: list[str] = []
        self._used = 0

    async def turn(self, text: str) -> str:
        self._log.append(text)
        prompt = "\n".join(self._log)
        wanted = max(self._window, Client.estimate(prompt))
        if self._res is not None and self._res.tokens < wanted:
            self._gate.settle(self._res, self._used)
            self._res = None
        if self._res is None:
            self._res = await self._gate.reserve(wanted)  # leak: reset() starts over and forgets it
        reply = await self._call(prompt)
        self._used += reply.used
        self._log.append(reply.text)
        return reply.text

    def reset(self) -> None:
        self._log.clear()
        self._used = 0
        self._res = None

    def close(self) -> None:
        if self._res is not None:
            self._gate.settle(self._res, self._used)
            self._res = None


async def judge(gate: TokenGate, call: Call, answer: str) -> int:
    async with Budgeted(gate, 512) as b:  # clean: Unparsable leaves through __aexit__
        reply = await call(f"Grade from 0 to 9:\n{answer}")
        b.used = reply.used
        if not reply.text[:1].isdigit():
            raise Unparsable(reply.text)
        return int(reply.text[0])


async def self_play(gate: TokenGate, black: Call, white: Call, turns: int) -> list[str]:
    one = await gate.reserve(1024)  # clean: near miss, the handler settles it when the second reservation fails
    try:
        two = await gate.reserve(1024 * turns)  # clean: settled in the finally
    except Oversize:
        gate.cancel(one)
        raise
    log_: list[str] = []
    try:
        for i in range(turns):
            reply = await (black, white)[i % 2]("\n".join(log_))
            log_.append(reply.text)
    finally:
        gate.settle(two, 1024 * len(log_))
        gate.settle(one, 1024)
    return log_
