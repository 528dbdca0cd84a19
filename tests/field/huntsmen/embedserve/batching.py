"""Collects requests into batches and runs them."""
from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from .replicas import NoReplica, ReplicaGone, ReplicaSet
from .slabs import Result, Slab, SlabPool

logger = logging.getLogger("embedserve.batching")


class Expired(Exception):
    pass


@dataclass
class Request:
    texts: list[str]
    future: asyncio.Future
    deadline: float
    enqueued: float = field(default_factory=time.monotonic)

    def expired(self) -> bool:
        return time.monotonic() > self.deadline


class Batcher:
    def __init__(self, pool: SlabPool, replicas: ReplicaSet, linger: float = 0.004):
        self.pool, self.replicas = pool, replicas
        self.linger = linger
        self._queue: asyncio.Queue[Request] = asyncio.Queue()
        self._carry: Request | None = None
        self._tasks: set[asyncio.Task] = set()
        self.skipped = self.batches = 0

    async def submit(self, texts: list[str], patience: float = 2.0) -> Result:
        if len(texts) > self.pool.rows:
            raise ValueError(f"at most {self.pool.rows} texts")
        future = asyncio.get_running_loop().create_future()
        await self._queue.put(Request(texts, future, time.monotonic() + patience))
        return await asyncio.wait_for(future, patience)

    async def _collect(self) -> list[Request]:
        first = self._carry or await self._queue.get()
        self._carry = None
        batch, rows = [first], len(first.texts)
        end = time.monotonic() + self.linger
        while (left := end - time.monotonic()) > 0:
            try:
                req = await asyncio.wait_for(self._queue.get(), left)
            except asyncio.TimeoutError:
                break
            if rows + len(req.texts) > self.pool.rows:
                self._carry = req
                break
            batch.append(req)
            rows += len(req.texts)
        return batch

    async def run(self) -> None:
        while True:
            batch = await self._collect()
            slab = await self.pool.rent()  # leak: if all requests expired meanwhile the loop continues with the slab rented
            for req in [r for r in batch if r.expired()]:
                batch.remove(req)
                if not req.future.done():
                    req.future.set_exception(Expired())
            if not batch:
                self.skipped += 1
                continue
            task = asyncio.create_task(self._execute(batch, slab))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _execute(self, batch: list[Request], slab: Slab) -> None:
        texts = [t for r in batch for t in r.texts]
        try:
            async with self.replicas.claimed() as replica:  # clean: the context manager yields it back
                await replica.encode(texts, out=slab.array)
            row = 0
            for req in batch:
                n = len(req.texts)
                answer = Result(self.pool, self.pool.hold(slab), row, row + n)  # leak: a request that timed out has a done future and nobody releases its result
                if not req.future.done():
                    req.future.set_result(answer)
                row += n
            self.batches += 1
        except (ReplicaGone, NoReplica) as exc:
            logger.warning("batch of %d lost: %s", len(texts), exc)
            for req in batch:
                if not req.future.done():
                    req.future.set_exception(exc)
        finally:
            self.pool.drop(slab)

    async def drain(self) -> None:
        while self._tasks:
            await asyncio.wait(set(self._tasks))
