"""Trainer side: cut the state dict into shards and push them to every worker."""
from __future__ import annotations

import asyncio
import logging
from typing import Mapping, Sequence

from .buffers import SyncBuffer, SyncBufferPool

log = logging.getLogger("rollout.sync")


class WeightSync:
    def __init__(self, pool: SyncBufferPool, workers: Sequence) -> None:
        self.pool = pool
        self.workers = list(workers)
        self.version = 0
        self._tasks: set[asyncio.Task] = set()
        self._outbox: dict[str, SyncBuffer] = {}

    async def pack(self, name: str, raw: bytes) -> SyncBuffer:
        """Rented buffer with the shard in it."""
        buf = await self.pool.rent()  # clean: returned to the caller
        buf.data[:len(raw)] = raw
        buf.used = len(raw)
        buf.version = self.version
        return buf

    async def broadcast(self, state: Mapping[str, bytes]) -> int:
        self.version += 1
        sent = 0
        for name, raw in state.items():
            if not raw:
                continue
            buf = await self.pack(name, raw)  # clean: near miss, handed to a task which unrents it in its finally
            task = asyncio.create_task(self._push_all(name, buf))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            sent += 1
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        return sent

    async def _push_all(self, name: str, buf: SyncBuffer) -> None:
        try:
            for w in self.workers:
                await w.receive(name, bytes(buf.data[:buf.used]), buf.version)
        finally:
            self.pool.unrent(buf)

    async def push_one(self, worker, name: str, raw: bytes, timeout: float) -> bool:
        buf = await self.pack(name, raw)  # leak: a timeout is caught and answered with False before the unrent
        try:
            await asyncio.wait_for(worker.receive(name, bytes(buf.data[:buf.used]), buf.version), timeout)
        except asyncio.TimeoutError:
            log.warning("worker %s timed out on %s", worker, name)
            return False
        self.pool.unrent(buf)
        return True

    async def push_with_retry(self, worker, name: str, raw: bytes, tries: int = 3) -> bool:
        for n in range(tries):
            buf = await self.pack(name, raw)  # clean: near miss, each try unrents in the finally, `continue` included
            try:
                await worker.receive(name, bytes(buf.data[:buf.used]), buf.version)
                return True
            except ConnectionError:
                await asyncio.sleep(0.001 * n)
                continue
            finally:
                self.pool.unrent(buf)
        return False

    async def stage(self, name: str, raw: bytes) -> None:
        self._outbox[name] = await self.pack(name, raw)  # leak: a tensor staged twice before flush overwrites its buffer

    async def flush(self) -> None:
        while self._outbox:
            name, buf = self._outbox.popitem()
            await self._push_all(name, buf)

    async def delta(self, old: bytes, new: bytes) -> bytes:
        a = await self.pack("old", old)  # leak: equal lengths are required, the mismatch returns only the second buffer
        b = await self.pack("new", new)  # clean: unrented on both ways
        if a.used != b.used:
            self.pool.unrent(b)
            return new
        out = bytes(x ^ y for x, y in zip(a.data[:a.used], b.data[:b.used]))
        self.pool.unrent(a)
        self.pool.unrent(b)
        return out
