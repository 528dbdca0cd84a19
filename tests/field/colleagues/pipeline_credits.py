"""1F1B pipeline stage over asyncio: microbatch credits bound what is in flight."""
from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import AsyncIterator, Awaitable, Callable

log = logging.getLogger("pipe")

class CreditLine:
    """In-flight credits of one link; spend() waits, try_spend() does not."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._wake = asyncio.Condition()

    async def spend(self, n: int = 1) -> None:
        async with self._wake:
            await self._wake.wait_for(lambda: self._used + n <= self._limit)
            self._used += n

    def try_spend(self, n: int = 1) -> bool:
        if self._used + n > self._limit:
            return False
        self._used += n
        return True

    async def refund(self, n: int = 1) -> None:
        async with self._wake:
            self._used -= n
            self._wake.notify_all()

    @contextlib.asynccontextmanager
    async def charged(self, n: int = 1) -> AsyncIterator[None]:
        await self.spend(n)  # clean: finally refunds
        try:
            yield
        finally:
            await self.refund(n)

class LinkDown(Exception):
    pass

class Stage:
    def __init__(self, fwd: CreditLine, bwd: CreditLine, send, recv) -> None:
        self.fwd, self.bwd = fwd, bwd
        self.send, self.recv = send, recv
        self.outstanding: dict[int, int] = {}
        self.tasks: set[asyncio.Task] = set()

    async def forward(self, mb: int, x) -> None:
        """Credit is held until on_grad() for the same microbatch."""
        await self.fwd.spend()  # clean: near miss, outstanding[mb] is refunded in on_grad
        self.outstanding[mb] = self.outstanding.get(mb, 0) + 1
        await self.send(mb, x)

    async def on_grad(self, mb: int) -> None:
        n = self.outstanding.pop(mb, 0)
        if n:
            await self.fwd.refund(n)

    async def backward(self, mb: int, g) -> bool:
        await self.bwd.spend()  # leak: the handled LinkDown returns without a refund
        try:
            await self.send(mb, g)
        except LinkDown:
            log.warning("link down at %d", mb)
            return False
        await self.bwd.refund()
        return True

    async def backward_retry(self, mb: int, g, tries: int = 3) -> bool:
        for attempt in range(tries):
            await self.bwd.spend()  # clean: near miss, finally refunds each try, also on return
            try:
                await self.send(mb, g)
                return True
            except LinkDown:
                log.info("retry %d of %d", attempt, mb)
            finally:
                await self.bwd.refund()
        return False

    async def broadcast(self, items: list[tuple[int, object]]) -> int:
        sent = 0
        for mb, x in items:
            await self.fwd.spend()  # leak: continue on None skips the refund
            if x is None:
                continue
            await self.send(mb, x)
            sent += 1
            await self.fwd.refund()
        return sent

    async def drain(self, items: list[tuple[int, object]]) -> int:
        sent = 0
        for mb, x in items:
            if x is None:
                continue
            async with self.fwd.charged():  # clean: context manager refunds
                await self.send(mb, x)
            sent += 1
        return sent

    def fire(self, mb: int, x) -> bool:
        """Start a send in the background if there is credit."""
        if not self.fwd.try_spend():  # clean: near miss, the task's coroutine refunds in finally
            return False
        task = asyncio.ensure_future(self._send_then_refund(mb, x))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return True

    async def _send_then_refund(self, mb: int, x) -> None:
        try:
            await self.send(mb, x)
        finally:
            await self.fwd.refund()

    def fire_both(self, mb: int, x) -> bool:
        if not self.fwd.try_spend():  # leak: lost when the bwd line has no credit
            return False
        if not self.bwd.try_spend():  # clean: _both refunds each line when done
            return False
        self.tasks.add(asyncio.ensure_future(self._both(mb, x)))
        return True

    async def _both(self, mb: int, x) -> None:
        try:
            await self.send(mb, x)
        finally:
            await self.fwd.refund()
            await self.bwd.refund()

async def warmup(stage: Stage, depth: int, make: Callable[[int], Awaitable]) -> None:
    await stage.fwd.spend(depth)  # leak: spends depth credits and refunds only one
    for mb in range(depth):
        await stage.send(mb, await make(mb))
    await stage.fwd.refund()

async def cooldown(stage: Stage, depth: int) -> None:
    await stage.bwd.spend(depth)  # clean: near miss, refunded one by one, depth times
    for mb in range(depth):
        await stage.recv(mb)
        await stage.bwd.refund()

async def headroom(line: CreditLine, want: int) -> int:
    """How many credits could be spent now, at most `want`."""
    got = 0
    while got < want and line.try_spend():  # clean: near miss, the exact count is refunded
        got += 1
    if got:
        await line.refund(got)
    return got
