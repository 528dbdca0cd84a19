"""Pushes trainer weights to inference workers in chunks over asyncio."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Awaitable, Callable, Dict, List, Optional, Tuple

log = logging.getLogger(__name__)

Send = Callable[[int, bytes], Awaitable[None]]


@dataclass
class ChunkBuffer:
    index: int
    data: bytearray
    length: int = 0

    def fill(self, payload: bytes) -> None:
        self.data[: len(payload)] = payload
        self.length = len(payload)

    def view(self) -> bytes:
        return bytes(self.data[: self.length])


class ChunkPool:
    """Waiters queue up for buffers; rent and unrent run on the event loop."""

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._idle: List[ChunkBuffer] = [ChunkBuffer(i, bytearray(size)) for i in range(count)]
        self._waiters: List["asyncio.Future[ChunkBuffer]"] = []

    async def rent(self) -> ChunkBuffer:
        if self._idle:
            return self._idle.pop()
        fut: "asyncio.Future[ChunkBuffer]" = asyncio.get_running_loop().create_future()
        self._waiters.append(fut)
        return await fut

    def rent_nowait(self) -> Optional[ChunkBuffer]:
        return self._idle.pop() if self._idle else None

    def unrent(self, buf: ChunkBuffer) -> None:
        while self._waiters:
            fut = self._waiters.pop(0)
            if not fut.done():
                fut.set_result(buf)
                return
        self._idle.append(buf)


class WeightSync:
    def __init__(self, pool: ChunkPool, send: Send, max_links: int = 4) -> None:
        self.pool = pool
        self.send = send
        self._links = asyncio.Semaphore(max_links)
        self._version_lock = asyncio.Lock()
        self.version = 0
        self._outbox: Dict[int, Tuple[int, ChunkBuffer]] = {}
        self._tasks: List["asyncio.Task[None]"] = []

    async def push_chunk(self, worker: int, payload: bytes) -> None:
        buf = await self.pool.rent()  # clean: unrented in the finally
        try:
            buf.fill(payload)
            await self.send(worker, buf.view())
        finally:
            self.pool.unrent(buf)

    async def push_with_retry(self, worker: int, payload: bytes, attempts: int = 3) -> bool:
        buf = await self.pool.rent()  # clean: near miss, one buffer for all attempts, unrented on either way out
        buf.fill(payload)
        for attempt in range(attempts):
            try:
                await self.send(worker, buf.view())
            except ConnectionError:
                await asyncio.sleep(0)
                continue
            self.pool.unrent(buf)
            return True
        self.pool.unrent(buf)
        return False

    async def push_on_link(self, worker: int, payload: bytes) -> bool:
        await self._links.acquire()  # leak: a connection error returns False with the permit
        try:
            await self.send(worker, payload)
        except ConnectionError as exc:
            log.warning("worker %d: %s", worker, exc)
            return False
        self._links.release()
        return True

    async def push_all(self, workers: List[int], payload: bytes) -> int:
        ok = 0
        for worker in workers:
            await self._links.acquire()  # clean: near miss, the finally releases also on continue
            try:
                if worker < 0:
                    continue
                await self.push_chunk(worker, payload)
                ok += 1
            finally:
                self._links.release()
        return ok

    async def start_push(self, worker: int, payload: bytes) -> None:
        buf = await self.pool.rent()  # clean: near miss, handed to the task, which unrents it
        buf.fill(payload)
        self._tasks.append(asyncio.create_task(self._deliver(worker, buf)))

    async def _deliver(self, worker: int, buf: ChunkBuffer) -> None:
        try:
            await self.send(worker, buf.view())
        except ConnectionError:
            log.warning("worker %d did not take its chunk", worker)
        finally:
            self.pool.unrent(buf)

    async def start_versioned(self, worker: int, payload: bytes) -> None:
        version = self.version
        buf = await self.pool.rent()  # leak: the task returns without unrent when the version has moved on
        buf.fill(payload)
        self._tasks.append(asyncio.create_task(self._deliver_if_current(worker, version, buf)))

    async def _deliver_if_current(self, worker: int, version: int, buf: ChunkBuffer) -> None:
        if version != self.version:
            log.debug("version %d is stale", version)
            return
        await self._deliver(worker, buf)

    async def join(self) -> None:
        tasks, self._tasks = self._tasks, []
        await asyncio.gather(*tasks)

    async def stage(self, worker: int, payload: bytes) -> None:
        buf = await self.pool.rent()  # clean: near miss, an older entry of the worker is taken out and unrented
        buf.fill(payload)
        old = self._outbox.pop(worker, None)
        if old is not None:
            self.pool.unrent(old[1])
        self._outbox[worker] = (self.version, buf)

    async def flush(self) -> int:
        sent = 0
        while self._outbox:
            worker, (version, buf) = self._outbox.popitem()
            try:
                if version == self.version:
                    await self.send(worker, buf.view())
                    sent += 1
            finally:
                self.pool.unrent(buf)
        return sent

    async def bump(self, expected: int) -> bool:
        await self._version_lock.acquire()  # leak: a version that is not the expected one returns with the lock held
        if self.version != expected:
            return False
        self.version += 1
        self._version_lock.release()
        return True

    async def push_layers(self, worker: int, layers: List[bytes]) -> int:
        """Packs small layers together into one buffer before it is sent."""
        buf: Optional[ChunkBuffer] = None
        pending = b""
        sent = 0
        for layer in layers:
            if buf is None:
                buf = await self.pool.rent()  # leak: what is pending after the last layer is not sent and the buffer stays out
            if len(pending) + len(layer) > self.pool.size:
                buf.fill(pending)
                await self.send(worker, buf.view())
                self.pool.unrent(buf)
                buf = None
                sent += len(pending)
                pending = b""
            pending += layer
        return sent

    async def push_delta(self, worker: int, base: bytes, new: bytes) -> int:
        a = self.pool.rent_nowait()  # clean: near miss, unrented below whenever it is not None
        b = self.pool.rent_nowait()  # clean: near miss, unrented below whenever it is not None
        n = 0
        if a is not None and b is not None:
            a.fill(base)
            b.fill(new)
            delta = bytes(x ^ y for x, y in zip(a.view(), b.view()))
            await self.send(worker, delta)
            n = len(delta)
        for buf in (a, b):
            if buf is not None:
                self.pool.unrent(buf)
        return n
