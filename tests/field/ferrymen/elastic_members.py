"""Elastic membership: ranks are handed out by a registry with heartbeats; agents join, leave and re-form."""
from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import time
from dataclasses import dataclass, field
from typing import AsyncIterator, Awaitable, Callable, Optional

log = logging.getLogger("elastic")


@dataclass
class Seat:
    rank: int
    node: str
    epoch: int
    beat: float = field(default_factory=time.monotonic)


class SeatRegistry:
    """Ranks 0..limit-1. The lowest vacant rank is always given first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.epoch = 0
        self._vacant = list(range(limit))
        self._seats: dict[int, Seat] = {}
        self._changed = asyncio.Condition()

    async def enroll(self, node: str, timeout: float = 60.0) -> Optional[Seat]:
        """A seat for the node, or None when none became vacant in time."""
        deadline = time.monotonic() + timeout
        async with self._changed:
            while not self._vacant:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), left)
            rank = heapq.heappop(self._vacant)
            seat = self._seats[rank] = Seat(rank, node, self.epoch)
            return seat

    async def withdraw(self, seat: Seat) -> None:
        async with self._changed:
            if self._seats.pop(seat.rank, None) is not None:
                heapq.heappush(self._vacant, seat.rank)
                self.epoch += 1
                self._changed.notify_all()

    def beat(self, seat: Seat) -> None:
        seat.beat = time.monotonic()

    def members(self) -> list[Seat]:
        return [self._seats[r] for r in sorted(self._seats)]


@contextlib.asynccontextmanager
async def seated(registry: SeatRegistry, node: str) -> AsyncIterator[Optional[Seat]]:
    seat = await registry.enroll(node)  # clean: withdrawn in finally
    try:
        yield seat
    finally:
        if seat is not None:
            await registry.withdraw(seat)


async def enroll_patiently(registry: SeatRegistry, node: str, tries: int = 5) -> Optional[Seat]:
    """Enroll with back-off; the seat is the caller's."""
    for attempt in range(tries):
        seat = await registry.enroll(node, timeout=2.0 ** attempt)  # clean: returned when there is one
        if seat is not None:
            return seat
        await asyncio.sleep(0.1 * attempt)
    return None


async def enroll_low(registry: SeatRegistry, node: str, below: int, tries: int = 5) -> Optional[Seat]:
    """A seat whose rank lies under `below`, since only those are near the storage."""
    for attempt in range(tries):
        seat = await registry.enroll(node, timeout=1.0)  # leak: a high rank is not withdrawn
        if seat is None:
            return None
        if seat.rank < below:
            return seat
        log.info("%s got rank %d, wants < %d (try %d)", node, seat.rank, below, attempt)
        await asyncio.sleep(0.5)
    return None


async def enroll_even(registry: SeatRegistry, node: str, tries: int = 5) -> Optional[Seat]:
    spare: list[Seat] = []
    got: Optional[Seat] = None
    for _ in range(tries):
        seat = await registry.enroll(node, timeout=1.0)  # clean: near miss, spare is withdrawn
        if seat is None:
            break
        if seat.rank % 2 == 0:
            got = seat
            break
        spare.append(seat)
    for seat in spare:
        await registry.withdraw(seat)
    return got


class Agent:
    def __init__(self, registry: SeatRegistry, node: str,
                 run_step: Callable[[Seat, int], Awaitable[bool]]) -> None:
        self.registry = registry
        self.node = node
        self.run_step = run_step
        self.seat: Optional[Seat] = None
        self.standby: Optional[Seat] = None
        self._pulse: Optional[asyncio.Task] = None
        self.steps = itertools.count()
        self.finished = False

    async def join(self) -> bool:
        if self.seat is not None:
            return True
        self.seat = await enroll_patiently(self.registry, self.node)  # clean: leave() withdraws it
        if self.seat is None:
            return False
        self._pulse = asyncio.create_task(self._beat_loop(self.seat))
        return True

    async def _beat_loop(self, seat: Seat) -> None:
        while True:
            self.registry.beat(seat)
            await asyncio.sleep(1.0)

    async def leave(self) -> None:
        if self._pulse is not None:
            self._pulse.cancel()
            self._pulse = None
        if self.seat is not None:
            await self.registry.withdraw(self.seat)
            self.seat = None
        self.finished = True

    async def reserve_standby(self) -> None:
        if self.standby is None:
            self.standby = await self.registry.enroll(self.node)  # leak: promote() drops it

    async def promote(self) -> bool:
        """The standby's rank becomes ours."""
        if self.standby is None or self.seat is None:
            return False
        self.standby.epoch = self.registry.epoch
        self.seat.node = f"{self.node}/standby{self.standby.rank}"
        self.standby = None
        return True

    async def run(self, total: int) -> int:
        done = 0
        async with seated(self.registry, self.node) as seat:  # clean: the manager withdraws
            if seat is None:
                return 0
            for step in range(total):
                if not await self.run_step(seat, step):
                    return done
                done += 1
        return done

    async def run_elastic(self, total: int) -> int:
        """Re-enroll whenever the epoch moved."""
        done = 0
        seat = await self.registry.enroll(self.node)  # clean: near miss, withdrawn when stale or at the end
        while seat is not None and done < total:
            if seat.epoch != self.registry.epoch:
                await self.registry.withdraw(seat)
                seat = await self.registry.enroll(self.node)  # clean: withdrawn as the first is
                continue
            await self.run_step(seat, done)
            done += 1
        if seat is not None:
            await self.registry.withdraw(seat)
        return done

    async def probe(self) -> int:
        """What rank would we get?"""
        seat = await enroll_patiently(self.registry, self.node, tries=1)  # leak: only its number is returned
        return -1 if seat is None else seat.rank

    async def trial_step(self) -> bool:
        seat = await self.registry.enroll(self.node, timeout=5.0)  # leak: a failed step keeps it
        if seat is None:
            return False
        began = time.monotonic()
        ok = await self.run_step(seat, 0)
        if not ok:
            log.warning("%s: trial failed after %.1fs", self.node, time.monotonic() - began)
            return False
        await self.registry.withdraw(seat)
        return True


class Coordinator:
    """Seats whole nodes (several ranks at once) and evicts what no longer beats."""

    def __init__(self, registry: SeatRegistry, silence: float) -> None:
        self.registry = registry
        self.silence = silence
        self.gangs: dict[str, list[Seat]] = {}
        self.tasks: set[asyncio.Task] = set()

    async def seat_gang(self, node: str, size: int) -> bool:
        if node in self.gangs:
            return False
        gang: list[Seat] = []
        for _ in range(size):
            seat = await self.registry.enroll(node, timeout=5.0)  # clean: near miss, undone or in gangs
            if seat is None:
                for earlier in gang:
                    await self.registry.withdraw(earlier)
                return False
            gang.append(seat)
        self.gangs[node] = gang
        return True

    async def seat_pair(self, a: str, b: str) -> bool:
        if a == b or a in self.gangs or b in self.gangs:
            return False
        first = await self.registry.enroll(a, timeout=5.0)  # leak: not withdrawn when the second is refused
        if first is None:
            return False
        second = await self.registry.enroll(b, timeout=5.0)  # clean: kept in gangs, dismissed later
        if second is None:
            log.warning("%s seated at %d, but no seat for %s", a, first.rank, b)
            return False
        self.gangs[a] = [first]
        self.gangs[b] = [second]
        return True

    async def dismiss(self, node: str) -> None:
        for seat in self.gangs.pop(node, ()):
            await self.registry.withdraw(seat)

    async def sweep(self) -> list[str]:
        now = time.monotonic()
        silent = [n for n, gang in self.gangs.items() if any(now - s.beat > self.silence for s in gang)]
        for node in silent:
            await self.dismiss(node)
        return silent

    def spawn(self, agent: Agent, seat: Seat) -> None:
        async def body() -> None:
            step = 0
            while await agent.run_step(seat, step):
                step += 1

        task = asyncio.create_task(body())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(lambda _: asyncio.ensure_future(self.registry.withdraw(seat)))

    async def adopt(self, agent: Agent) -> bool:
        seat = await self.registry.enroll(agent.node)  # clean: near miss, the task's callback withdraws it
        if seat is None:
            return False
        self.spawn(agent, seat)
        return True

    async def shutdown(self) -> None:
        for node in list(self.gangs):
            await self.dismiss(node)
        for task in list(self.tasks):
            task.cancel()
