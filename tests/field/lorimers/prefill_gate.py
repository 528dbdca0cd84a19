"""Admission of prefill and decode work to one attention engine (asyncio)."""
from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import AsyncIterator, Awaitable, Callable, Dict, List, Optional, Set


class Rejected(Exception):
    pass


@dataclass(eq=False)
class Permit:
    tokens: int
    serial: int
    task: Optional["asyncio.Task[int]"] = None


class TokenBudget:
    """Permits worth a number of prefill tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._serial = itertools.count()
        self._cond = asyncio.Condition()

    async def reserve(self, tokens: int) -> Permit:
        async with self._cond:
            await self._cond.wait_for(lambda: self.used + tokens <= self.capacity)
            self.used += tokens
            return Permit(tokens, next(self._serial))

    def reserve_nowait(self, tokens: int) -> Optional[Permit]:
        if self.used + tokens > self.capacity:
            return None
        self.used += tokens
        return Permit(tokens, next(self._serial))

    async def unreserve(self, permit: Permit) -> None:
        async with self._cond:
            self.used -= permit.tokens
            self._cond.notify_all()

    @asynccontextmanager
    async def reserved(self, tokens: int) -> AsyncIterator[Permit]:
        permit = await self.reserve(tokens)  # clean: unreserved in the finally
        try:
            yield permit
        finally:
            await self.unreserve(permit)


@dataclass
class Prompt:
    rid: str
    tokens: List[int]
    priority: int = 0
    permit: Optional[Permit] = None
    cached: bool = False


Engine = Callable[[List[int]], Awaitable[int]]


class PrefillGate:
    def __init__(self, budget: TokenBudget, engine: Engine) -> None:
        self.budget = budget
        self.engine = engine
        self._tasks: Set["asyncio.Task[int]"] = set()
        self._live: Dict[str, Permit] = {}
        self._bg: Set["asyncio.Task[None]"] = set()
        self.decode_sem = asyncio.Semaphore(4)

    async def run(self, p: Prompt) -> int:
        async with self.budget.reserved(len(p.tokens)):  # clean: context manager unreserves
            return await self.engine(p.tokens)

    async def run_cached(self, p: Prompt) -> int:
        permit = await self.budget.reserve(len(p.tokens))  # leak: a cached prompt returns with the permit held
        if p.cached:
            return 0
        try:
            return await self.engine(p.tokens)
        finally:
            await self.budget.unreserve(permit)

    async def run_chunked(self, p: Prompt, chunk: int) -> int:
        total = 0
        for i in range(0, len(p.tokens), chunk):
            part = p.tokens[i : i + chunk]
            permit = await self.budget.reserve(len(part))  # clean: near miss, the empty-result break is inside the try
            try:
                got = await self.engine(part)
                if got == 0:
                    break
                total += got
            finally:
                await self.budget.unreserve(permit)
        return total

    async def run_with_deadline(self, p: Prompt, seconds: float) -> Optional[int]:
        permit = await self.budget.reserve(len(p.tokens))  # leak: a timeout is caught and returns None with the permit held
        try:
            out = await asyncio.wait_for(self.engine(p.tokens), seconds)
        except asyncio.TimeoutError:
            return None
        await self.budget.unreserve(permit)
        return out

    # -- background tasks -----------------------------------------------------
    async def _work(self, tokens: List[int], permit: Permit) -> int:
        try:
            return await self.engine(tokens)
        finally:
            await self.budget.unreserve(permit)

    async def spawn(self, p: Prompt) -> "asyncio.Task[int]":
        permit = await self.budget.reserve(len(p.tokens))  # clean: near miss, the task _work unreserves
        task = asyncio.create_task(self._work(p.tokens, permit))
        permit.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def spawn_plain(self, p: Prompt) -> "asyncio.Task[int]":
        permit = await self.budget.reserve(len(p.tokens))  # leak: the task knows nothing of it and the callback only forgets the task
        task = asyncio.ensure_future(self.engine(p.tokens))
        permit.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def spawn_nowait(self, p: Prompt) -> bool:
        permit = self.budget.reserve_nowait(len(p.tokens))  # clean: given to the callback, which unreserves
        if permit is None:
            return False
        task = asyncio.ensure_future(self.engine(p.tokens))
        self._tasks.add(task)

        def _done(t: "asyncio.Task[int]") -> None:
            self._tasks.discard(t)
            bg = asyncio.ensure_future(self.budget.unreserve(permit))
            self._bg.add(bg)
            bg.add_done_callback(self._bg.discard)

        task.add_done_callback(_done)
        return True

    # -- permits held by request ------------------------------------------------
    async def admit(self, p: Prompt) -> None:
        if p.permit is not None:
            raise Rejected(p.rid)
        p.permit = await self.budget.reserve(len(p.tokens))  # clean: retire unreserves p.permit

    async def retire(self, p: Prompt) -> None:
        permit, p.permit = p.permit, None
        if permit is not None:
            await self.budget.unreserve(permit)

    async def enter_session(self, rid: str, tokens: int) -> None:
        permit = await self.budget.reserve(tokens)  # leak: a session entered twice overwrites the first permit
        self._live[rid] = permit

    async def widen_session(self, rid: str, tokens: int) -> bool:
        extra = self.budget.reserve_nowait(tokens)  # clean: near miss, the older permit is saved before the entry is overwritten
        if extra is None:
            return False
        old = self._live.get(rid)
        self._live[rid] = extra
        if old is not None:
            await self.budget.unreserve(old)
        return True

    async def leave_session(self, rid: str) -> None:
        permit = self._live.pop(rid, None)
        if permit is not None:
            await self.budget.unreserve(permit)

    async def admit_pair(self, target: Prompt, draft: Prompt) -> bool:
        if target.permit is not None or draft.permit is not None:
            raise Rejected(target.rid)
        a = self.budget.reserve_nowait(len(target.tokens))  # leak: the draft's refusal returns without undoing it
        if a is None:
            return False
        b = self.budget.reserve_nowait(len(draft.tokens))  # clean: moved into draft, retired later
        if b is None:
            return False
        target.permit, draft.permit = a, b
        return True

    async def admit_all(self, prompts: List[Prompt]) -> bool:
        if any(p.permit is not None for p in prompts):
            raise Rejected("admitted twice")
        for i, p in enumerate(prompts):
            p.permit = self.budget.reserve_nowait(len(p.tokens))  # clean: near miss, the refusal retires all admitted before
            if p.permit is None:
                for q in prompts[:i]:
                    await self.retire(q)
                return False
        return True

    # -- decode slots -------------------------------------------------------------
    async def decode(self, tokens: List[int], steps: int) -> int:
        await self.decode_sem.acquire()  # leak: zero steps returns before the try
        if steps == 0:
            return 0
        try:
            out = 0
            for _ in range(steps):
                out += await self.engine(tokens)
            return out
        finally:
            self.decode_sem.release()

    async def decode_or_reject(self, tokens: List[int]) -> int:
        if self.decode_sem.locked():
            raise Rejected("decode slots busy")
        await self.decode_sem.acquire()  # clean: released in the finally
        try:
            return await self.engine(tokens)
        finally:
            self.decode_sem.release()

    async def drain(self) -> None:
        while self._tasks or self._bg:
            await asyncio.gather(*self._tasks, *self._bg, return_exceptions=True)
            await asyncio.sleep(0)


async def _demo() -> None:
    async def engine(tokens: List[int]) -> int:
        await asyncio.sleep(0)
        return len(tokens)

    gate = PrefillGate(TokenBudget(64), engine)
    p = Prompt("a", [1] * 8)
    await gate.run(p)
    await gate.run_chunked(p, 3)
    await gate.spawn(p)
    gate.spawn_nowait(p)
    await gate.admit(p)
    await gate.retire(p)
    assert not await gate.admit_all([Prompt(str(i), [1] * 20) for i in range(4)])
    await gate.widen_session("s", 4)
    await gate.leave_session("s")
    await gate.decode_or_reject([1])
    await gate.drain()
    print("used", gate.budget.used, gate.decode_sem._value)
    await gate.run_cached(Prompt("c", [1], cached=True))
    await gate.spawn_plain(p)
    await gate.decode([1], 0)
    await gate.drain()
    print("used", gate.budget.used, gate.decode_sem._value)


if __name__ == "__main__":
    asyncio.run(_demo())
