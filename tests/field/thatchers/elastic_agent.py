"""Node agent of an elastic job: GPU slots, ports and worker lifecycle (asyncio)."""
from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import Awaitable, Callable

log = logging.getLogger(__name__)


class NoCapacity(Exception):
    pass


class PortBook:
    def __init__(self, lo: int, hi: int) -> None:
        self._free = set(range(lo, hi))

    def reserve(self) -> int:
        if not self._free:
            raise NoCapacity("ports")
        return self._free.pop()

    def cancel(self, port: int) -> None:
        self._free.add(port)


class GpuSlots:
    def __init__(self, n: int) -> None:
        self._free = list(range(n))
        self._changed = asyncio.Condition()

    async def occupy(self, count: int) -> list[int]:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._free) >= count)
            taken, self._free = self._free[:count], self._free[count:]
            return taken

    def try_occupy(self, count: int) -> list[int]:
        if len(self._free) < count:
            return []
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    async def vacate(self, gpus: list[int]) -> None:
        async with self._changed:
            self._free.extend(gpus)
            self._changed.notify_all()


@dataclass
class Worker:
    rank: int
    gpus: list[int]
    port: int
    debug_port: int | None = None
    restarts: int = 0
    task: asyncio.Task | None = None
    env: dict[str, str] = field(default_factory=dict)


Launch = Callable[[Worker], Awaitable[int]]


class ElasticAgent:
    def __init__(self, slots: GpuSlots, ports: PortBook, launch: Launch, per_worker: int = 1) -> None:
        self.slots = slots
        self.ports = ports
        self.launch = launch
        self.per_worker = per_worker
        self.workers: dict[int, Worker] = {}
        self.standby: list[list[int]] = []
        self.rdzv_port: int | None = None

    async def start_worker(self, rank: int) -> Worker | None:
        await self.stop_worker(rank)
        gpus = await self.slots.occupy(self.per_worker)  # leak: without a free port the handler returns None and keeps the GPUs
        try:
            port = self.ports.reserve()  # clean: stop_worker() and reap() cancel it
        except NoCapacity:
            log.error("no port for rank %d", rank)
            return None
        w = Worker(rank, gpus, port)
        self.workers[rank] = w
        w.task = asyncio.create_task(self.launch(w))
        return w

    async def start_debuggable(self, rank: int) -> Worker | None:
        await self.stop_worker(rank)
        gpus = self.slots.try_occupy(self.per_worker)  # clean: near miss, vacated in the handler, later by stop_worker() or reap()
        if not gpus:
            return None
        try:
            port = self.ports.reserve()  # clean: near miss, cancelled by stop_worker() and reap()
        except NoCapacity:
            await self.slots.vacate(gpus)
            return None
        w = Worker(rank, gpus, port)
        with contextlib.suppress(NoCapacity):
            w.debug_port = self.ports.reserve()  # leak: reap() forgets the debug port of a worker that exits by itself
        self.workers[rank] = w
        w.task = asyncio.create_task(self.launch(w))
        return w

    async def stop_worker(self, rank: int) -> None:
        w = self.workers.pop(rank, None)
        if w is None:
            return
        if w.task is not None:
            w.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await w.task
        self.ports.cancel(w.port)
        if w.debug_port is not None:
            self.ports.cancel(w.debug_port)
        await self.slots.vacate(w.gpus)

    async def reap(self) -> list[int]:
        gone = [r for r, w in self.workers.items() if w.task is not None and w.task.done()]
        for rank in gone:
            w = self.workers.pop(rank)
            self.ports.cancel(w.port)
            await self.slots.vacate(w.gpus)
        return gone

    def new_rendezvous(self) -> int:
        self.rdzv_port = self.ports.reserve()  # leak: the port of the former round is overwritten
        return self.rdzv_port

    async def move_port(self, rank: int) -> int:
        w = self.workers[rank]
        fresh = self.ports.reserve()  # clean: near miss, the worker keeps it and the old one is cancelled
        old, w.port = w.port, fresh
        self.ports.cancel(old)
        return fresh

    def grow_standby(self, n: int) -> int:
        for _ in range(n):
            gpus = self.slots.try_occupy(self.per_worker)  # clean: near miss, parked on the standby list until shutdown() or promotion
            if not gpus:
                break
            self.standby.append(gpus)
        return len(self.standby)

    def promote(self, rank: int) -> bool:
        if not self.standby or rank not in self.workers:
            return False
        self.workers[rank].gpus.extend(self.standby.pop())
        return True

    async def run_once(self, rank: int, job: Launch) -> int | None:
        gpus = await self.slots.occupy(self.per_worker)  # clean: near miss, finally vacates also when the run is cancelled
        try:
            port = self.ports.reserve()  # leak: a timed-out job returns from its handler before the port is cancelled
            w = Worker(rank, gpus, port)
            try:
                rc = await asyncio.wait_for(job(w), timeout=600)
            except asyncio.TimeoutError:
                log.warning("rank %d timed out", rank)
                return None
            self.ports.cancel(port)
            return rc
        finally:
            await self.slots.vacate(gpus)

    async def shutdown(self) -> None:
        for rank in list(self.workers):
            await self.stop_worker(rank)
        while self.standby:
            await self.slots.vacate(self.standby.pop())
        if self.rdzv_port is not None:
            self.ports.cancel(self.rdzv_port)
            self.rdzv_port = None


async def preflight(slots: GpuSlots, check: Callable[[int], Awaitable[bool]], total: int) -> list[int]:
    bad: list[int] = []
    gpus = await slots.occupy(total)  # leak: only the bad GPUs are vacated, the good ones stay taken
    for g in gpus:
        if not await check(g):
            bad.append(g)
    await slots.vacate(bad)
    return bad
