"""Async dynamic batching for the embedding endpoint."""
from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Awaitable, Callable, Dict, List, Optional

import numpy as np


@dataclass
class Arena:
    index: int
    data: np.ndarray


class ArenaPool:
    def __init__(self, count: int, rows: int, width: int) -> None:
        self._idle: "asyncio.Queue[Arena]" = asyncio.Queue()
        for i in range(count):
            self._idle.put_nowait(Arena(i, np.zeros((rows, width), dtype=np.int64)))

    async def checkout(self) -> Arena:
        return await self._idle.get()

    def try_checkout(self) -> Optional[Arena]:
        return None if self._idle.empty() else self._idle.get_nowait()

    def checkin(self, arena: Arena) -> None:
        self._idle.put_nowait(arena)


class Permits:
    def __init__(self, limit: int) -> None:
        self._left = limit
        self._cond = asyncio.Condition()

    def try_enter(self) -> bool:
        if self._left <= 0:
            return False
        self._left -= 1
        return True

    async def enter(self) -> None:
        async with self._cond:
            await self._cond.wait_for(lambda: self._left > 0)
            self._left -= 1

    async def leave(self) -> None:
        async with self._cond:
            self._left += 1
            self._cond.notify()


@dataclass
class EmbedRequest:
    tokens: List[int]
    future: "asyncio.Future[np.ndarray]"


@dataclass
class Batch:
    arena: Arena
    requests: List[EmbedRequest] = field(default_factory=list)


Forward = Callable[[np.ndarray], Awaitable[np.ndarray]]


class EmbeddingBatcher:
    def __init__(self, pool: ArenaPool, permits: Permits, forward: Forward, max_batch: int) -> None:
        self.pool = pool
        self.permits = permits
        self.forward = forward
        self.max_batch = max_batch
        self.pending: List[EmbedRequest] = []
        self.building: Optional[Batch] = None
        self.tasks: Dict[int, "asyncio.Task[None]"] = {}
        self._calibration: Optional[Arena] = None

    async def embed(self, tokens: List[int]) -> Optional[np.ndarray]:
        await self.permits.enter()  # clean: the finally leaves, cancelled or not
        try:
            fut: "asyncio.Future[np.ndarray]" = asyncio.get_running_loop().create_future()
            self.pending.append(EmbedRequest(tokens, fut))
            return await fut
        except asyncio.CancelledError:
            raise
        finally:
            await self.permits.leave()

    async def embed_now(self, tokens: List[int]) -> Optional[np.ndarray]:
        if not self.permits.try_enter():  # leak: no arena to be had returns without leave
            return None
        arena = self.pool.try_checkout()  # clean: near miss, checked in by the finally, None returns before
        if arena is None:
            return None
        try:
            arena.data[0, :len(tokens)] = tokens
            out = await self.forward(arena.data[:1])
            return out[0]
        finally:
            self.pool.checkin(arena)
            await self.permits.leave()

    async def embed_timeout(self, tokens: List[int], timeout: float) -> Optional[np.ndarray]:
        arena = await self.pool.checkout()  # leak: the timeout handler returns None without a checkin
        arena.data[0, :len(tokens)] = tokens
        try:
            out = await asyncio.wait_for(self.forward(arena.data[:1]), timeout)
        except asyncio.TimeoutError:
            return None
        self.pool.checkin(arena)
        return out[0]

    async def embed_shielded(self, tokens: List[int], timeout: float) -> Optional[np.ndarray]:
        arena = await self.pool.checkout()  # clean: near miss, the handler and the ordinary end both check in
        arena.data[0, :len(tokens)] = tokens
        try:
            out = await asyncio.wait_for(self.forward(arena.data[:1]), timeout)
        except (asyncio.TimeoutError, asyncio.CancelledError):
            self.pool.checkin(arena)
            return None
        self.pool.checkin(arena)
        return out[0]

    def _assemble(self) -> Optional[Batch]:
        arena = self.pool.try_checkout()  # leak: when all requests were cancelled the arena is dropped
        if arena is None:
            return None
        taken, self.pending = self.pending[:self.max_batch], self.pending[self.max_batch:]
        live = [r for r in taken if not r.future.cancelled()]
        if not live:
            return None
        for row, req in enumerate(live):
            arena.data[row, :len(req.tokens)] = req.tokens
        return Batch(arena, live)

    async def _run(self, batch: Batch) -> None:
        try:
            out = await self.forward(batch.arena.data[:len(batch.requests)])
            for req, vec in zip(batch.requests, out):
                if not req.future.done():
                    req.future.set_result(vec)
        except RuntimeError as exc:
            for req in batch.requests:
                if not req.future.done():
                    req.future.set_exception(exc)
        finally:
            self.pool.checkin(batch.arena)

    async def loop(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            if not self.pending:
                await asyncio.sleep(0.001)
                continue
            batch = self._assemble()  # clean: near miss, None when nothing was taken, else _run checks in
            if batch is None:
                await asyncio.sleep(0.001)
                continue
            await self._run(batch)

    async def flush(self) -> int:
        served = 0
        while self.pending:
            batch = self._assemble()  # leak: a batch of one is failed back to its caller and its arena forgotten
            if batch is None:
                break
            if len(batch.requests) == 1:
                batch.requests[0].future.cancel()
                continue
            await self._run(batch)
            served += len(batch.requests)
        return served

    async def begin(self) -> None:
        if self.building is not None:
            await self._run(self.building)
        self.building = Batch(await self.pool.checkout())  # clean: near miss, the former batch was run, which checks its arena in

    async def end(self) -> None:
        batch, self.building = self.building, None
        if batch is not None:
            await self._run(batch)

    async def calibrate(self, rows: int) -> np.ndarray:
        self._calibration = await self.pool.checkout()  # leak: overwrites the arena of an earlier calibration
        self._calibration.data[:rows] = 1
        return await self.forward(self._calibration.data[:rows])

    async def close(self) -> None:
        await self.end()
        if self._calibration is not None:
            self.pool.checkin(self._calibration)
            self._calibration = None
