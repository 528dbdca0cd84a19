"""Async admission control in front of the engine: permits per tenant, seats per engine."""
from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import Any, AsyncIterator, Awaitable, Callable, Dict, List, Optional, Set

log = logging.getLogger(__name__)


class Overloaded(Exception):
    pass


class TenantLimiter:
    """`enter` waits for a permit, `try_enter` does not; `leave` returns it."""

    def __init__(self, per_tenant: int) -> None:
        self._per_tenant = per_tenant
        self._inside: Dict[str, int] = {}
        self._changed = asyncio.Condition()

    async def enter(self, tenant: str) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._inside.get(tenant, 0) < self._per_tenant)
            self._inside[tenant] = self._inside.get(tenant, 0) + 1

    async def try_enter(self, tenant: str) -> bool:
        async with self._changed:
            if self._inside.get(tenant, 0) >= self._per_tenant:
                return False
            self._inside[tenant] = self._inside.get(tenant, 0) + 1
            return True

    async def leave(self, tenant: str) -> None:
        async with self._changed:
            self._inside[tenant] -= 1
            self._changed.notify()


class Seats:
    """Batch seats, handed out as small integers."""

    def __init__(self, n: int) -> None:
        self._free: Set[int] = set(range(n))

    def take(self) -> Optional[int]:
        return self._free.pop() if self._free else None

    def vacate(self, seat: int) -> None:
        if seat in self._free:
            raise ValueError(seat)
        self._free.add(seat)


class Gateway:
    def __init__(self, limiter: TenantLimiter, seats: Seats, engine: Any) -> None:
        self.limiter = limiter
        self.seats = seats
        self.engine = engine
        self.tasks: Set["asyncio.Task[Any]"] = set()
        self.streams: Dict[str, int] = {}

    async def complete_or_reject(self, tenant: str, prompt: str) -> Optional[str]:
        if not await self.limiter.try_enter(tenant):  # leak: no seat, returns None with the permit
            return None
        seat = self.seats.take()  # clean: vacated in the finally
        if seat is None:
            return None
        try:
            return await self.engine.generate(prompt, seat=seat)
        finally:
            self.seats.vacate(seat)
            await self.limiter.leave(tenant)

    async def complete_with_deadline(self, tenant: str, prompt: str, seconds: float) -> Optional[str]:
        await self.limiter.enter(tenant)  # leak: timeout is caught and answered None, leave is skipped
        try:
            text = await asyncio.wait_for(self.engine.generate(prompt), seconds)
        except asyncio.TimeoutError:
            return None
        await self.limiter.leave(tenant)
        return text

    async def complete_with_retry(self, tenant: str, prompt: str, tries: int) -> str:
        for i in range(tries):
            await self.limiter.enter(tenant)  # clean: near miss, finally runs before each retry
            try:
                return await self.engine.generate(prompt)
            except Overloaded:
                await asyncio.sleep(0.01 * 2 ** i)
            finally:
                await self.limiter.leave(tenant)
        raise Overloaded(tenant)

    async def best_of(self, tenant: str, prompt: str, n: int) -> List[str]:
        out: List[str] = []
        while len(out) < n:
            seat = self.seats.take()  # leak: refused generation retries the loop with the seat taken
            if seat is None:
                await asyncio.sleep(0)
                continue
            try:
                text = await self.engine.generate(prompt, seat=seat)
            except Overloaded:
                continue
            self.seats.vacate(seat)
            out.append(text)
        return out

    async def spawn(self, tenant: str, prompt: str) -> "asyncio.Task[str]":
        await self.limiter.enter(tenant)  # clean: near miss, the task owns the permit and leaves at its end
        task = asyncio.ensure_future(self._run_and_leave(tenant, prompt))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _run_and_leave(self, tenant: str, prompt: str) -> str:
        try:
            return await self.engine.generate(prompt)
        finally:
            await self.limiter.leave(tenant)

    async def spawn_seated(self, prompt: str) -> Optional["asyncio.Task[str]"]:
        seat = self.seats.take()  # clean: near miss, done callback vacates
        if seat is None:
            return None
        task = asyncio.ensure_future(self.engine.generate(prompt, seat=seat))
        task.add_done_callback(lambda _t, s=seat: self.seats.vacate(s))
        return task

    async def spawn_background(self, prompt: str) -> bool:
        seat = self.seats.take()  # leak: the task gets the seat number but nobody vacates it
        if seat is None:
            return False
        task = asyncio.ensure_future(self.engine.generate(prompt, seat=seat))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return True

    def open_stream(self, stream_id: str) -> bool:
        if stream_id in self.streams:
            return True
        seat = self.seats.take()  # clean: kept in streams until close_stream
        if seat is None:
            return False
        self.streams[stream_id] = seat
        return True

    def move_stream(self, stream_id: str, new_id: str) -> bool:
        if stream_id not in self.streams:
            return False
        seat = self.streams.pop(stream_id)
        if new_id in self.streams:
            self.seats.vacate(seat)
            return False
        self.streams[new_id] = seat
        return True

    def close_stream(self, stream_id: str) -> None:
        seat = self.streams.pop(stream_id, None)
        if seat is not None:
            self.seats.vacate(seat)

    @asynccontextmanager
    async def admitted(self, tenant: str) -> AsyncIterator[None]:
        await self.limiter.enter(tenant)  # clean: left in the finally
        try:
            yield
        finally:
            await self.limiter.leave(tenant)

    async def embed(self, tenant: str, texts: List[str]) -> List[Any]:
        out: List[Any] = []
        async with self.admitted(tenant):  # clean: async with
            for t in texts:
                if not t:
                    continue
                out.append(await self.engine.embed(t))
        return out


class FairGateway(Gateway):
    """Borrowed capacity: an idle tenant's permit may be used by another."""

    async def complete_lent(self, tenant: str, lender: str, prompt: str) -> str:
        lent = not await self.limiter.try_enter(tenant)  # clean: near miss, `lent` tells whose permit is left
        if lent:
            await self.limiter.enter(lender)  # clean: left under the flag
        try:
            return await self.engine.generate(prompt)
        finally:
            await self.limiter.leave(lender if lent else tenant)

    async def warm(self, tenants: List[str], probe: Callable[[str], Awaitable[bool]]) -> List[str]:
        ok: List[str] = []
        for t in tenants:
            await self.limiter.enter(t)  # leak: failed probe skips the leave
            if await probe(t):
                ok.append(t)
                await self.limiter.leave(t)
            else:
                log.warning("probe failed for %s", t)
        return ok
