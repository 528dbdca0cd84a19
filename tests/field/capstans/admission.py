"""Front-door admission: request permits, token credits per tenant, and decode seats."""
import asyncio
import logging
import time
from contextlib import asynccontextmanager
from typing import AsyncIterator, Awaitable, Callable, Dict, Optional

log = logging.getLogger("frontdoor")


class Overloaded(Exception):
    def __init__(self, retry_after: float):
        super().__init__(f"retry after {retry_after:.1f}s")
        self.retry_after = retry_after


class TenantCredits:
    """Credits are returned when a request ends; they do not refill by time."""

    def __init__(self, limits: Dict[str, int]):
        self.limits = limits
        self.spent: Dict[str, int] = {t: 0 for t in limits}

    def spend(self, tenant: str, n: int) -> bool:
        if self.spent[tenant] + n > self.limits[tenant]:
            return False
        self.spent[tenant] += n
        return True

    def refund(self, tenant: str, n: int) -> None:
        self.spent[tenant] -= n


class Seats:
    """Decode seats, numbered so that the batch stays dense."""

    def __init__(self, n: int):
        self._open = asyncio.Semaphore(n)
        self._ids = list(range(n - 1, -1, -1))

    async def sit(self, timeout: float) -> Optional[int]:
        try:
            await asyncio.wait_for(self._open.acquire(), timeout)  # clean: the seat's number stands for it, stand() releases
        except asyncio.TimeoutError:
            return None
        return self._ids.pop()  # clean: handed to the caller

    async def sit_at(self, limit: int) -> Optional[int]:
        await self._open.acquire()  # leak: the semaphore is not released when the seat is refused
        seat = self._ids.pop()  # clean: appended again when it is refused
        if seat >= limit:
            self._ids.append(seat)
            return None
        return seat

    def stand(self, seat: int) -> None:
        self._ids.append(seat)
        self._open.release()


class Call:
    def __init__(self, rid: str, tenant: str, prompt_len: int, max_new: int):
        self.rid = rid
        self.tenant = tenant
        self.prompt_len = prompt_len
        self.max_new = max_new
        self.seat: Optional[int] = None
        self.cancelled = False
        self.started = time.monotonic()

    @property
    def cost(self) -> int:
        return self.prompt_len + self.max_new


Decode = Callable[[Call], AsyncIterator[int]]


class FrontDoor:
    def __init__(self, credits: TenantCredits, seats: Seats, decode: Decode, inflight: int = 512):
        self.credits = credits
        self.seats = seats
        self.decode = decode
        self.inflight = asyncio.BoundedSemaphore(inflight)
        self.calls: Dict[str, Call] = {}

    async def submit(self, call: Call) -> None:
        if call.rid in self.calls:
            raise ValueError(f"{call.rid} was submitted before")
        if not self.credits.spend(call.tenant, call.cost):  # leak: no refund when no seat comes free in time
            raise Overloaded(5.0)
        seat = await self.seats.sit(2.0)  # clean: moved into call.seat, given up by finish()
        if seat is None:
            raise Overloaded(1.0)
        call.seat = seat
        self.calls[call.rid] = call

    async def submit_batch(self, call: Call) -> bool:
        if call.rid in self.calls:
            return False
        if not self.credits.spend(call.tenant, call.cost):  # clean: refunded without a seat, else by finish()
            return False
        seat = await self.seats.sit(30.0)  # leak: a call cancelled while it waited keeps the seat
        if seat is None:
            self.credits.refund(call.tenant, call.cost)
            return False
        if call.cancelled:
            self.credits.refund(call.tenant, call.cost)
            log.info("%s cancelled in the queue", call.rid)
            return False
        call.seat = seat
        self.calls[call.rid] = call
        return True

    def finish(self, rid: str) -> None:
        call = self.calls.pop(rid, None)
        if call is None:
            return
        self.credits.refund(call.tenant, call.cost)
        if call.seat is not None:
            self.seats.stand(call.seat)
            call.seat = None

    async def stream(self, call: Call) -> AsyncIterator[int]:
        await self.inflight.acquire()  # clean: released in finally when the stream ends or is closed
        try:
            async for tok in self.decode(call):
                if call.cancelled:
                    return
                yield tok
        finally:
            self.inflight.release()

    async def stream_plain(self, call: Call) -> AsyncIterator[int]:
        await self.inflight.acquire()  # leak: a cancelled call returns from the generator without release
        async for tok in self.decode(call):
            if call.cancelled:
                return
            yield tok
        self.inflight.release()

    async def embed(self, call: Call, run: Callable[[Call], Awaitable[list]]) -> list:
        got = self.credits.spend(call.tenant, call.prompt_len)  # clean: near miss, refunded in finally under the same flag
        try:
            if not got and call.tenant != "internal":
                raise Overloaded(1.0)
            return await run(call)
        finally:
            if got:
                self.credits.refund(call.tenant, call.prompt_len)

    @asynccontextmanager
    async def maintenance(self, n: int):
        taken = 0
        try:
            while taken < n:
                await self.inflight.acquire()  # clean: near miss, counted in taken and released in finally
                taken += 1
            yield
        finally:
            for _ in range(taken):
                self.inflight.release()
