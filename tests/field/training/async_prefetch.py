import asyncio
import logging
from dataclasses import dataclass
from typing import AsyncIterator, Dict, List, Optional

import torch

logger = logging.getLogger("prefetch")


@dataclass
class Shard:
    path: str
    rows: int
    corrupt: bool = False


class AsyncBufferPool:
    def __init__(self, n: int, rows: int, width: int) -> None:
        self._q: "asyncio.Queue[torch.Tensor]" = asyncio.Queue()
        for _ in range(n):
            self._q.put_nowait(torch.empty(rows, width))

    async def acquire(self) -> torch.Tensor:
        return await self._q.get()

    def try_acquire(self) -> Optional[torch.Tensor]:
        if self._q.empty():
            return None
        return self._q.get_nowait()

    def release(self, buf: torch.Tensor) -> None:
        self._q.put_nowait(buf)


class ShardPrefetcher:
    def __init__(self, pool: AsyncBufferPool, parallel: int = 4) -> None:
        self.pool = pool
        self.sem = asyncio.Semaphore(parallel)
        self.lock = asyncio.Lock()
        self.ready: "asyncio.Queue[Optional[torch.Tensor]]" = asyncio.Queue()
        self.loaded: Dict[str, torch.Tensor] = {}

    async def _read(self, shard: Shard, buf: torch.Tensor) -> int:
        await asyncio.sleep(0)
        buf[: shard.rows].fill_(float(len(shard.path)))
        return shard.rows

    async def produce(self, shards: List[Shard]) -> None:
        for s in shards:
            buf = await self.pool.acquire()  # clean: goes through the ready queue to consume()
            await self._read(s, buf)
            await self.ready.put(buf)
        await self.ready.put(None)

    async def consume(self) -> float:
        total = 0.0
        while True:
            buf = await self.ready.get()
            if buf is None:
                return total
            total += float(buf.sum())
            self.pool.release(buf)

    async def produce_valid(self, shards: List[Shard]) -> None:
        for s in shards:
            buf = await self.pool.acquire()  # leak: a corrupt shard is skipped after the acquire
            if s.corrupt:
                logger.warning("skip %s", s.path)
                continue
            await self._read(s, buf)
            await self.ready.put(buf)
        await self.ready.put(None)

    async def load(self, shard: Shard) -> None:
        if shard.path in self.loaded:
            return
        buf = await self.pool.acquire()  # clean: near miss, loaded at most once, evict and evict_all release it
        await self._read(shard, buf)
        self.loaded[shard.path] = buf

    def evict(self, path: str) -> bool:
        buf = self.loaded.pop(path, None)
        if buf is None:
            return False
        self.pool.release(buf)
        return True

    def evict_all(self) -> None:
        for path in list(self.loaded):
            self.evict(path)

    async def checksum(self, shard: Shard) -> Optional[float]:
        await self.sem.acquire()  # leak: an empty shard returns with the permit held
        if shard.rows == 0:
            return None
        buf = await self.pool.acquire()  # clean: released on the only way out after it
        n = await self._read(shard, buf)
        value = float(buf[:n].sum())
        self.pool.release(buf)
        self.sem.release()
        return value

    async def checksum_guarded(self, shard: Shard) -> Optional[float]:
        await self.sem.acquire()  # clean: near miss, the finally covers both returns
        try:
            if shard.rows == 0:
                return None
            buf = self.pool.try_acquire()  # clean: near miss, the None return holds nothing
            if buf is None:
                return None
            n = await self._read(shard, buf)
            value = float(buf[:n].sum())
            self.pool.release(buf)
            return value
        finally:
            self.sem.release()

    async def stats(self, shards: List[Shard]) -> List[float]:
        out = []
        for s in shards:
            async with self.sem:
                buf = await self.pool.acquire()  # leak: the handler logs and goes on without a release
                try:
                    n = await self._read(s, buf)
                    if n == 0:
                        raise ValueError(s.path)
                    out.append(float(buf[:n].mean()))
                    self.pool.release(buf)
                except ValueError as exc:
                    logger.warning("empty shard %s", exc)
        return out

    async def replace(self, path: str, shard: Shard) -> bool:
        await self.lock.acquire()  # leak: the unknown path returns with the lock held
        if path not in self.loaded:
            return False
        await self._read(shard, self.loaded[path])
        self.lock.release()
        return True

    async def iterate(self, shards: List[Shard]) -> AsyncIterator[torch.Tensor]:
        for s in shards:
            buf = await self.pool.acquire()  # clean: released after the consumer comes back, also on close
            try:
                n = await self._read(s, buf)
                yield buf[:n].clone()
            finally:
                self.pool.release(buf)


async def warm(pool: AsyncBufferPool, n: int) -> List[torch.Tensor]:
    return [await pool.acquire() for _ in range(n)]  # clean: the list belongs to the caller


async def warm_and_cool(pool: AsyncBufferPool, n: int) -> None:
    bufs = await warm(pool, n)  # clean: all released
    for b in bufs:
        b.zero_()
        pool.release(b)


async def warm_check(pool: AsyncBufferPool, n: int) -> bool:
    bufs = await warm(pool, n)  # leak: only the last buffer goes back
    for b in bufs:
        b.zero_()
    pool.release(bufs[-1])
    return len(bufs) == n


async def run(pool: AsyncBufferPool, shards: List[Shard]) -> float:
    pf = ShardPrefetcher(pool)
    task = asyncio.create_task(pf.produce(shards))
    total = await pf.consume()
    await task
    return total
