"""Leases on GPU inference workers, handed out by the gateway process."""
from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

log = logging.getLogger("gateway.leases")


class NoCapacity(Exception):
    def __init__(self, model: str) -> None:
        super().__init__(f"no worker for {model}")
        self.model = model


@dataclass(eq=False)
class Worker:
    name: str
    models: set[str]
    quarantined_until: float = 0.0


@dataclass(slots=True, eq=False)
class Lease:
    worker: Worker
    model: str
    token: int
    since: float = field(default_factory=time.monotonic)


@dataclass
class Request:
    model: str
    prompt: str
    queue_s: float = 5.0
    budget_s: float = 30.0


class Transport(Protocol):
    async def call(self, worker: Worker, req: Request) -> str: ...
    def chunks(self, worker: Worker, req: Request) -> AsyncIterator[str]: ...
    async def ping(self, worker: Worker) -> bool: ...
    async def copy_weights(self, src: Worker, dst: Worker) -> int: ...


class LeaseTable:
    def __init__(self, workers: Iterable[Worker]) -> None:
        self._free: deque[Worker] = deque(workers)
        self._held: dict[int, Lease] = {}
        self._changed = asyncio.Condition()
        self._tokens = itertools.count(1)

    def _pick(self, model: str) -> Worker | None:
        now = time.monotonic()
        for _ in range(len(self._free)):
            worker = self._free.popleft()  # leak: a worker that does not serve the model is not appended again
            if worker.quarantined_until > now:
                self._free.append(worker)
                continue
            if model not in worker.models:
                continue
            return worker
        return None

    def _record(self, worker: Worker, model: str) -> Lease:
        lease = Lease(worker, model, next(self._tokens))
        self._held[lease.token] = lease
        return lease

    async def lease(self, model: str, *, timeout: float) -> Lease:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        async with self._changed:
            while (worker := self._pick(model)) is None:  # clean: recorded and returned
                left = deadline - loop.time()
                if left <= 0:
                    raise NoCapacity(model)
                try:
                    await asyncio.wait_for(self._changed.wait(), left)
                except asyncio.TimeoutError:
                    raise NoCapacity(model) from None
            return self._record(worker, model)

    def try_lease(self, model: str) -> Lease | None:
        worker = self._pick(model)  # clean: recorded and returned, or None
        return self._record(worker, model) if worker is not None else None

    async def surrender(self, lease: Lease) -> None:
        async with self._changed:
            if self._held.pop(lease.token, None) is None:
                log.debug("lease %d given back twice", lease.token)
                return
            self._free.append(lease.worker)
            self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def held(self, model: str, *, timeout: float = 10.0) -> AsyncIterator[Lease]:
        lease = await self.lease(model, timeout=timeout)  # clean: finally
        try:
            yield lease
        finally:
            await self.surrender(lease)


class Gateway:
    def __init__(self, table: LeaseTable, transport: Transport) -> None:
        self._table = table
        self._transport = transport
        self._tasks: set[asyncio.Task[str]] = set()
        self.stats: Counter[str] = Counter()

    async def generate(self, req: Request) -> dict[str, Any]:
        lease = await self._table.lease(req.model, timeout=req.queue_s)  # leak: an exceeded budget answers 504 and keeps the lease
        try:
            text = await asyncio.wait_for(self._transport.call(lease.worker, req), req.budget_s)
        except asyncio.TimeoutError:
            self.stats["timeouts"] += 1
            return {"status": 504, "error": "budget exceeded"}
        await self._table.surrender(lease)
        self.stats["ok"] += 1
        return {"status": 200, "text": text, "worker": lease.worker.name}

    async def stream(self, req: Request) -> AsyncIterator[str]:
        lease = await self._table.lease(req.model, timeout=req.queue_s)  # leak: first_token() stops after one chunk and no finally guards the yield
        async for chunk in self._transport.chunks(lease.worker, req):
            if chunk:
                yield chunk
        await self._table.surrender(lease)

    async def first_token(self, req: Request) -> float:
        started = time.perf_counter()
        async for _ in self.stream(req):
            return time.perf_counter() - started
        return math.inf

    async def submit(self, req: Request) -> asyncio.Task[str]:
        lease = await self._table.lease(req.model, timeout=req.queue_s)  # clean: near miss, the task owns it and _drive() surrenders it
        task = asyncio.create_task(self._drive(lease, req))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _drive(self, lease: Lease, req: Request) -> str:
        try:
            return await self._transport.call(lease.worker, req)
        finally:
            await self._table.surrender(lease)

    async def hedged(self, req: Request, after_s: float) -> str:
        first = await self._table.lease(req.model, timeout=req.queue_s)  # clean: surrendered by its own _drive() task
        tasks = {asyncio.create_task(self._drive(first, req))}
        done, _ = await asyncio.wait(tasks, timeout=after_s)
        if not done:
            spare = self._table.try_lease(req.model)  # clean: near miss, None means no hedge, else the second task surrenders it even when cancelled
            if spare is not None:
                self.stats["hedges"] += 1
                tasks.add(asyncio.create_task(self._drive(spare, req)))
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
        return next(iter(done)).result()

    async def shutdown(self) -> None:
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)


class Canary:
    """Sets one worker of a new model aside and probes it until it is trusted."""

    def __init__(self, table: LeaseTable, transport: Transport, model: str) -> None:
        self._table = table
        self._transport = transport
        self._model = model
        self._lease: Lease | None = None
        self.failures = 0

    async def start(self) -> None:
        self._lease = await self._table.lease(self._model, timeout=60.0)  # leak: promote() forgets it without surrendering
        self.failures = 0

    async def probe(self) -> bool:
        assert self._lease is not None
        answer = await self._transport.call(self._lease.worker, Request(self._model, "2+2="))
        if "4" not in answer:
            self.failures += 1
        return self.failures < 3

    async def abandon(self) -> None:
        if self._lease is not None:
            await self._table.surrender(self._lease)
            self._lease = None

    def promote(self, trusted: dict[str, str]) -> None:
        assert self._lease is not None
        trusted[self._model] = self._lease.worker.name
        log.info("model %s is trusted on %s", self._model, self._lease.worker.name)
        self._lease = None


async def sweep(table: LeaseTable, transport: Transport, models: Iterable[str]) -> dict[str, bool]:
    verdict: dict[str, bool] = {}
    for model in models:
        lease = table.try_lease(model)  # leak: after a failed ping the loop goes on with the lease held
        if lease is None:
            verdict[model] = False
            continue
        if not await transport.ping(lease.worker):
            lease.worker.quarantined_until = time.monotonic() + 60.0
            verdict[model] = False
            continue
        await table.surrender(lease)
        verdict[model] = True
    return verdict


async def transfer_weights(table: LeaseTable, transport: Transport, old: str, new: str) -> int:
    src = await table.lease(old, timeout=30.0)  # clean: near miss, surrendered as well when the second lease fails
    try:
        dst = await table.lease(new, timeout=30.0)  # clean: surrendered in the finally
    except NoCapacity:
        await table.surrender(src)
        raise
    try:
        return await transport.copy_weights(src.worker, dst.worker)
    finally:
        await table.surrender(dst)
        await table.surrender(src)


async def calibrate(table: LeaseTable, transport: Transport, model: str, rounds: int = 8) -> float:
    async with table.held(model) as lease:  # clean: context manager
        started = time.perf_counter()
        for _ in range(rounds):
            await transport.call(lease.worker, Request(model, "ping"))
        return (time.perf_counter() - started) / rounds
