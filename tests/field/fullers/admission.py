"""Admission control for the generation service: weighted permits and the request queue."""
from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass
from typing import Any, Awaitable, Callable, Dict, List, Optional

logger = logging.getLogger(__name__)
Backend = Callable[[Any], Awaitable[Any]]


class Overloaded(Exception):
    pass


@dataclass(eq=False)
class Permit:
    weight: int


class PermitPool:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.available = capacity

    async def acquire(self, weight: int = 1) -> Permit:
        while self.available < weight:
            await asyncio.sleep(0.001)
        self.available -= weight
        return Permit(weight)

    def try_acquire(self, weight: int = 1) -> Optional[Permit]:
        if self.available < weight:
            return None
        self.available -= weight
        return Permit(weight)

    def release(self, permit: Permit) -> None:
        self.available += permit.weight


@dataclass
class Request:
    prompt: str
    expired: bool = False


@dataclass
class Ticket:
    request: Request
    permit: Permit
    cancelled: bool = False


class Admission:
    def __init__(self, permits: PermitPool, backend: Backend, depth: int = 8) -> None:
        self.permits = permits
        self.backend = backend
        self.queue: asyncio.Queue = asyncio.Queue(maxsize=depth)
        self.inflight: Dict[int, Permit] = {}
        self.parked: List[Permit] = []
        self.closing = False
        self._ids = itertools.count()

    async def submit(self, req: Request) -> Optional[Ticket]:
        permit = await self.permits.acquire()  # leak: a full queue is answered with None and the permit stays out
        ticket = Ticket(req, permit)
        try:
            self.queue.put_nowait(ticket)
        except asyncio.QueueFull:
            logger.info("queue full, rejecting")
            return None
        return ticket

    async def submit_or_raise(self, req: Request) -> Ticket:
        permit = await self.permits.acquire()  # clean: queued for the worker, released when the queue is full
        ticket = Ticket(req, permit)
        try:
            self.queue.put_nowait(ticket)
        except asyncio.QueueFull:
            self.permits.release(permit)
            raise Overloaded("queue full")
        return ticket

    async def worker(self) -> None:
        while not self.closing or not self.queue.empty():
            ticket: Ticket = await self.queue.get()
            try:
                if ticket.cancelled:
                    continue
                await self.backend(ticket.request)
            finally:
                self.permits.release(ticket.permit)

    async def spawn(self, req: Request) -> asyncio.Task:
        permit = await self.permits.acquire()  # clean: near miss, the task's done callback releases it
        task = asyncio.create_task(self.backend(req))
        task.add_done_callback(lambda _t: self.permits.release(permit))
        return task

    async def spawn_tracked(self, req: Request) -> asyncio.Task:
        rid = next(self._ids)
        self.inflight[rid] = await self.permits.acquire()  # clean: the done callback pops the entry and releases it
        task = asyncio.create_task(self.backend(req), name=str(rid))
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task) -> None:
        permit = self.inflight.pop(int(task.get_name()), None)
        if permit is not None:
            self.permits.release(permit)

    async def spawn_logged(self, req: Request) -> asyncio.Task:
        permit = await self.permits.acquire()  # leak: the callback leaves before the release when the task failed

        def finished(task: asyncio.Task) -> None:
            if task.cancelled() or task.exception() is not None:
                logger.error("request failed: %r", req.prompt[:32])
                return
            self.permits.release(permit)

        task = asyncio.create_task(self.backend(req))
        task.add_done_callback(finished)
        return task

    async def run(self, req: Request, admitted: bool = False) -> Any:
        permit: Optional[Permit] = None
        if not admitted:
            permit = await self.permits.acquire()  # clean: near miss, the same flag guards the release
        try:
            return await self.backend(req)
        finally:
            if not admitted:
                self.permits.release(permit)

    async def run_batch(self, reqs: List[Request], permit: Optional[Permit] = None) -> List[Any]:
        owned = permit is None
        if permit is None:
            permit = await self.permits.acquire(len(reqs))  # leak: not released when every request had expired
        outputs = []
        for req in reqs:
            if req.expired:
                continue
            outputs.append(await self.backend(req))
        if owned and outputs:
            self.permits.release(permit)
        return outputs

    def try_run_soon(self, req: Request) -> bool:
        permit = self.permits.try_acquire()  # leak: the closing check returns with the permit in hand
        if permit is None:
            return False
        if self.closing:
            return False
        task = asyncio.get_running_loop().create_task(self.backend(req))
        task.add_done_callback(lambda _t: self.permits.release(permit))
        return True

    async def shrink(self, n: int) -> None:
        for _ in range(n):
            self.parked.append(await self.permits.acquire())  # clean: near miss, parked until grow releases it

    def grow(self, n: int) -> None:
        while n and self.parked:
            self.permits.release(self.parked.pop())
            n -= 1

    async def _one(self, req: Request) -> Any:
        permit = await self.permits.acquire()  # leak: a failure is swallowed by the gather and the permit stays out
        out = await self.backend(req)
        self.permits.release(permit)
        return out

    async def _one_guarded(self, req: Request) -> Any:
        permit = await self.permits.acquire()  # clean: released by the finally
        try:
            return await self.backend(req)
        finally:
            self.permits.release(permit)

    async def fan_out(self, reqs: List[Request]) -> List[Any]:
        results = await asyncio.gather(*(self._one(r) for r in reqs), return_exceptions=True)
        return [r for r in results if not isinstance(r, BaseException)]

    async def fan_out_guarded(self, reqs: List[Request]) -> List[Any]:
        results = await asyncio.gather(*(self._one_guarded(r) for r in reqs), return_exceptions=True)
        return [r for r in results if not isinstance(r, BaseException)]


class BurstLane:
    """A lane that keeps one heavy permit while a burst lasts."""

    def __init__(self, permits: PermitPool) -> None:
        self.permits = permits
        self._held: Optional[Permit] = None

    async def extend(self, weight: int) -> None:
        self._held = await self.permits.acquire(weight)  # leak: a second extend overwrites the permit still held

    def close(self) -> None:
        if self._held is not None:
            self.permits.release(self._held)
            self._held = None


class SteadyLane:
    def __init__(self, permits: PermitPool) -> None:
        self.permits = permits
        self._held: Optional[Permit] = None

    async def resize(self, weight: int) -> None:
        self.close()
        self._held = await self.permits.acquire(weight)  # clean: near miss, close released the former one

    def close(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self.permits.release(held)


async def _main() -> None:
    async def backend(req: Any) -> str:
        await asyncio.sleep(0)
        return "ok"

    pool = PermitPool(4)
    adm = Admission(pool, backend)
    ticket = await adm.submit_or_raise(Request("a"))
    ticket.cancelled = True
    adm.closing = True
    await adm.worker()
    await (await adm.spawn(Request("b")))
    await (await adm.spawn_tracked(Request("c")))
    assert len(await adm.fan_out_guarded([Request("d")] * 6)) == 6
    await asyncio.sleep(0)
    assert pool.available == 4


if __name__ == "__main__":
    asyncio.run(_main())
