"""Asyncio feeder for a trainer: documents are fetched from object storage under a budget of tokens in memory.

The budget is counted in tokens, not in documents. What debit() took must come back by credit() once the
tokens have left the process; connections to storage come from a small pool of their own.
"""
from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass
from typing import AsyncIterator, Awaitable, Callable

import numpy as np


class TokenBudget:
    def __init__(self, limit: int):
        self.limit = limit
        self.spent = 0
        self._cond = asyncio.Condition()

    async def debit(self, tokens: int) -> int:
        async with self._cond:
            await self._cond.wait_for(lambda: self.spent + tokens <= self.limit)
            self.spent += tokens
        return tokens

    def debit_now(self, tokens: int) -> bool:
        if self.spent + tokens > self.limit:
            return False
        self.spent += tokens
        return True

    async def credit(self, tokens: int) -> None:
        async with self._cond:
            self.spent -= tokens
            self._cond.notify_all()


class Conn:
    def __init__(self, number: int):
        self.number = number
        self.uses = 0

    async def get(self, key: str) -> np.ndarray:
        self.uses += 1
        await asyncio.sleep(0)
        return np.frombuffer(key.encode() * 8, dtype=np.uint8).astype(np.int32)


class ConnPool:
    def __init__(self, size: int):
        self._idle: asyncio.Queue[Conn] = asyncio.Queue()
        for i in range(size):
            self._idle.put_nowait(Conn(i))

    async def connect(self) -> Conn:
        return await self._idle.get()

    def hangup(self, conn: Conn) -> None:
        self._idle.put_nowait(conn)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[Conn]:
        conn = await self.connect()  # clean: hung up in finally
        try:
            yield conn
        finally:
            self.hangup(conn)


@dataclass
class Doc:
    key: str
    tokens: np.ndarray
    cost: int


class Feeder:
    def __init__(self, pool: ConnPool, budget: TokenBudget, estimate: Callable[[str], int]):
        self.pool = pool
        self.budget = budget
        self.estimate = estimate
        self.ready: asyncio.Queue[Doc] = asyncio.Queue()
        self.tasks: set[asyncio.Task] = set()
        self.aside: deque[Doc] = deque()

    async def fetch(self, key: str) -> Doc:
        """A document whose cost is debited; the reader credits doc.cost."""
        cost = await self.budget.debit(self.estimate(key))  # clean: near miss, carried on in Doc.cost
        async with self.pool.session() as conn:  # clean: the context manager hangs up
            tokens = await conn.get(key)
        return Doc(key, tokens, cost)

    async def fetch_checked(self, key: str, least: int) -> Doc | None:
        cost = await self.budget.debit(self.estimate(key))  # leak: a short document gives None, no credit
        async with self.pool.session() as conn:  # clean: the context manager hangs up
            tokens = await conn.get(key)
        if len(tokens) < least:
            return None
        return Doc(key, tokens, cost)

    async def _produce(self, key: str) -> None:
        self.ready.put_nowait(await self.fetch(key))  # clean: credited by pop() or shutdown()

    def schedule(self, key: str) -> None:
        task = asyncio.ensure_future(self._produce(key))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def pop(self) -> np.ndarray:
        doc = await self.ready.get()
        out = doc.tokens.copy()
        await self.budget.credit(doc.cost)
        return out

    async def set_aside(self, key: str) -> None:
        """Documents too long for the current sequence length, for the next stage of the curriculum."""
        self.aside.append(await self.fetch(key))  # leak: shutdown clears the deque, no credit

    async def shutdown(self) -> None:
        await asyncio.gather(*self.tasks, return_exceptions=True)
        while not self.ready.empty():
            doc = self.ready.get_nowait()
            await self.budget.credit(doc.cost)
        self.aside.clear()

    async def stream(self, keys: list[str]) -> AsyncIterator[np.ndarray]:
        for key in keys:
            doc = await self.fetch(key)  # clean: credited before the yield
            out = doc.tokens.copy()
            await self.budget.credit(doc.cost)
            yield out

    async def stream_dedup(self, keys: list[str]) -> AsyncIterator[np.ndarray]:
        seen: set[bytes] = set()
        for key in keys:
            doc = await self.fetch(key)  # leak: the repeated document goes on without credit
            digest = doc.tokens.tobytes()
            if digest in seen:
                continue
            seen.add(digest)
            await self.budget.credit(doc.cost)
            yield doc.tokens


async def with_retries(pool: ConnPool, key: str, attempts: int) -> np.ndarray | None:
    for n in range(attempts):
        conn = await pool.connect()  # leak: an empty answer leads to the next attempt on another connection
        tokens = await conn.get(key)
        if len(tokens):
            pool.hangup(conn)
            return tokens
        await asyncio.sleep(0.1 * 2**n)
    return None


async def refresh(pool: ConnPool, keys: list[str], every: int) -> int:
    """Changes the connection every so often, since old ones get slow."""
    total = 0
    conn = await pool.connect()  # clean: near miss, hung up before it is replaced and at the end
    for key in keys:
        if conn.uses >= every:
            pool.hangup(conn)
            conn = await pool.connect()  # clean: as the first
        total += len(await conn.get(key))
    pool.hangup(conn)
    return total


async def burst(feeder: Feeder, keys: list[str]) -> int:
    docs = await asyncio.gather(*(feeder.fetch(k) for k in keys))  # clean: every cost is credited in the loop
    longest = max((len(d.tokens) for d in docs), default=0)
    for d in docs:
        await feeder.budget.credit(d.cost)
    return longest


async def first_of(feeder: Feeder, keys: list[str]) -> np.ndarray:
    docs = await asyncio.gather(*(feeder.fetch(k) for k in keys))  # leak: only the chosen one is credited
    chosen = min(docs, key=lambda d: len(d.tokens))
    await feeder.budget.credit(chosen.cost)
    return chosen.tokens


async def guarded(budget: TokenBudget, tokens: int, work: Callable[[], Awaitable[None]]) -> bool:
    if not budget.debit_now(tokens):  # clean: False holds nothing, finally credits
        return False
    try:
        await work()
    finally:
        await budget.credit(tokens)
    return True


async def opportunistic(budget: TokenBudget, sizes: list[int], work: Callable[[int], Awaitable[bool]]) -> int:
    done = 0
    for n in sizes:
        if not budget.debit_now(n):  # leak: work that reports False leaves its tokens debited
            break
        if await work(n):
            done += n
            await budget.credit(n)
    return done
