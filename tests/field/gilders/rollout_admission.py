"""Admission control for an RL rollout server: token permits, task table, result futures."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import AsyncIterator, Dict, List, Optional, Set

log = logging.getLogger(__name__)


class Overloaded(Exception):
    pass


class PermitBank:
    def __init__(self, total: int):
        self.total = total
        self.left = total
        self._waiters: "asyncio.Condition" = asyncio.Condition()

    def try_reserve(self, n: int) -> bool:
        if self.left < n:
            return False
        self.left -= n
        return True

    async def reserve(self, n: int) -> int:
        async with self._waiters:
            await self._waiters.wait_for(lambda: self.left >= n)
            self.left -= n
            return n

    async def unreserve(self, n: int) -> None:
        async with self._waiters:
            self.left += n
            self._waiters.notify_all()

    def unreserve_nowait(self, n: int) -> None:
        self.left += n


@dataclass
class Rollout:
    rid: int
    prompt: List[int]
    budget: int
    held: int = 0
    output: List[int] = field(default_factory=list)
    cancelled: bool = False


class Engine:
    def __init__(self, fail_on: Optional[Set[int]] = None):
        self.fail_on = fail_on or set()

    async def generate(self, r: Rollout) -> List[int]:
        await asyncio.sleep(0)
        if r.rid in self.fail_on:
            raise RuntimeError(f"rollout {r.rid} failed")
        return r.prompt[-1:] * r.budget

    async def stream(self, r: Rollout) -> AsyncIterator[int]:
        for i in range(r.budget):
            await asyncio.sleep(0)
            yield i


class Frontend:
    def __init__(self, bank: PermitBank, engine: Engine):
        self.bank = bank
        self.engine = engine
        self._tasks: Dict[int, "asyncio.Task"] = {}
        self._parked: List[Rollout] = []
        self._draining = False

    # -- direct ----------------------------------------------------------
    async def run_or_reject(self, r: Rollout) -> List[int]:
        if not self.bank.try_reserve(r.budget):  # clean: near miss, the failing branch of the if holds nothing and the finally returns it
            raise Overloaded()
        try:
            if r.cancelled:
                return []
            return await self.engine.generate(r)
        finally:
            self.bank.unreserve_nowait(r.budget)

    async def run_quiet(self, r: Rollout) -> Optional[List[int]]:
        try:
            n = await self.bank.reserve(r.budget)  # leak: the handler survives an engine error without returning it
            out = await self.engine.generate(r)
            await self.bank.unreserve(n)
            return out
        except RuntimeError as exc:
            log.warning("%s", exc)
            return None

    # -- task table ------------------------------------------------------
    async def submit(self, r: Rollout) -> None:
        n = await self.bank.reserve(r.budget)  # clean: near miss, the task's done callback returns it
        task = asyncio.ensure_future(self.engine.generate(r))
        self._tasks[r.rid] = task

        def done(_: "asyncio.Task") -> None:
            self._tasks.pop(r.rid, None)
            self.bank.unreserve_nowait(n)

        task.add_done_callback(done)

    async def submit_guarded(self, r: Rollout) -> bool:
        n = await self.bank.reserve(r.budget)  # leak: lost when the server is draining
        if self._draining:
            return False
        self._tasks[r.rid] = asyncio.ensure_future(self._finish(r, n))
        return True

    async def _finish(self, r: Rollout, n: int) -> None:
        try:
            r.output = await self.engine.generate(r)
        finally:
            await self.bank.unreserve(n)
            self._tasks.pop(r.rid, None)

    async def drain(self) -> None:
        self._draining = True
        while self._tasks:
            await asyncio.gather(*list(self._tasks.values()), return_exceptions=True)
            await asyncio.sleep(0)

    # -- request objects -------------------------------------------------
    async def attach(self, r: Rollout) -> None:
        r.held = await self.bank.reserve(r.budget)  # clean: near miss, moved into the rollout, detach returns it

    async def detach(self, r: Rollout) -> None:
        if r.held:
            n, r.held = r.held, 0
            await self.bank.unreserve(n)

    async def two_phase(self, r: Rollout) -> List[int]:
        await self.attach(r)
        try:
            first = await self.engine.generate(r)
            r.prompt = r.prompt + first
            return first + await self.engine.generate(r)
        finally:
            await self.detach(r)

    async def extend(self, r: Rollout, extra: int) -> None:
        """Raise a live rollout's budget."""
        n = await self.bank.reserve(extra)  # clean: near miss, added to what the rollout holds, detach returns the sum
        r.held += n
        r.budget += extra

    async def take_over(self, old: Rollout, new: Rollout) -> None:
        """A resubmitted rollout continues under the old one's reservation."""
        new.held = await self.bank.reserve(new.budget)  # leak: overwritten by the old rollout's reservation when it has one
        if old.held:
            new.held, old.held = old.held, 0
        new.output = list(old.output)

    def park(self, r: Rollout) -> bool:
        if not self.bank.try_reserve(1):  # clean: near miss, counted in held, unpark returns it through detach
            return False
        r.held += 1
        self._parked.append(r)
        return True

    async def unpark(self) -> Optional[Rollout]:
        while self._parked:
            r = self._parked.pop()
            await self.detach(r)
            if r.cancelled:
                continue
            return r
        return None

    # -- streaming -------------------------------------------------------
    async def stream(self, r: Rollout) -> AsyncIterator[int]:
        n = await self.bank.reserve(r.budget)  # clean: near miss, the finally also runs when the consumer closes the stream
        try:
            async for tok in self.engine.stream(r):
                if r.cancelled:
                    return
                yield tok
        finally:
            self.bank.unreserve_nowait(n)

    async def stream_metered(self, r: Rollout) -> AsyncIterator[int]:
        """Permits are given back token by token."""
        n = await self.bank.reserve(r.budget)  # leak: a cancelled stream returns with the rest still reserved
        async for tok in self.engine.stream(r):
            if r.cancelled:
                return
            n -= 1
            await self.bank.unreserve(1)
            yield tok
        await self.bank.unreserve(n)

    def probe_capacity(self, sizes: List[int]) -> int:
        """Largest size that would be admitted now."""
        best = 0
        for n in sizes:
            if self.bank.try_reserve(n):  # leak: a smaller size than the best so far is never returned
                if n > best:
                    best = n
                    self.bank.unreserve_nowait(n)
        return best


async def _main() -> None:
    bank = PermitBank(16)
    fe = Frontend(bank, Engine({9}))
    print(await fe.run_or_reject(Rollout(2, [3], 2)))
    await fe.submit(Rollout(3, [1], 2))
    await fe.submit(Rollout(9, [1], 2))
    await fe.submit_guarded(Rollout(4, [1], 2))
    await fe.drain()
    print(await fe.two_phase(Rollout(5, [7], 1)), fe.park(Rollout(6, [7], 1)), await fe.unpark())
    print([t async for t in fe.stream(Rollout(7, [1], 3))], len(fe._parked))
    print([t async for t in fe.stream_metered(Rollout(7, [1], 3))], bank.left)


if __name__ == "__main__":
    asyncio.run(_main())
