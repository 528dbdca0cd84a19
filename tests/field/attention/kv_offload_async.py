"""Asynchronous offload of KV pages to host memory."""
import asyncio
import logging
from collections import deque
from typing import Any, Awaitable, Callable, Deque, Dict, List, Optional, Tuple

import torch

logger = logging.getLogger(__name__)


class HostPagePool:
    def __init__(self, pages: int, page_elems: int):
        self.store = torch.empty(pages, page_elems)
        self._idle: Deque[int] = deque(range(pages))
        self._cond = asyncio.Condition()

    async def acquire_page(self) -> int:
        async with self._cond:
            while not self._idle:
                await self._cond.wait()
            return self._idle.popleft()

    def acquire_page_nowait(self) -> Optional[int]:
        return self._idle.popleft() if self._idle else None

    async def release_page(self, page: int) -> None:
        async with self._cond:
            self._idle.append(page)
            self._cond.notify()


class Offloader:
    def __init__(self, pool: HostPagePool, gpu: torch.Tensor, max_io: int = 2):
        self.pool = pool
        self.gpu = gpu
        self.io = asyncio.Semaphore(max_io)
        self.where: Dict[int, int] = {}
        self.queue: "asyncio.Queue[Optional[Tuple[int, int]]]" = asyncio.Queue()

    async def offload(self, block: int) -> int:
        await self.discard(block)
        page = await self.pool.acquire_page()  # clean: the where table keeps it, discard releases it
        async with self.io:
            self.pool.store[page].copy_(self.gpu[block].flatten())
            await asyncio.sleep(0)
        self.where[block] = page
        return page

    async def offload_once(self, block: int) -> int:
        page = await self.pool.acquire_page()  # leak: a block already on the host returns the old page and forgets this one
        if block in self.where:
            return self.where[block]
        self.pool.store[page].copy_(self.gpu[block].flatten())
        self.where[block] = page
        return page

    async def restore(self, block: int) -> bool:
        page = self.where.pop(block, None)
        if page is None:
            return False
        self.gpu[block].copy_(self.pool.store[page].view_as(self.gpu[block]))
        await self.pool.release_page(page)
        return True

    async def discard(self, block: int) -> None:
        page = self.where.pop(block, None)
        if page is not None:
            await self.pool.release_page(page)

    async def discard_all(self) -> None:
        for b in list(self.where):
            await self.discard(b)

    async def throttled(self, fn: Callable[[], Awaitable[Any]]) -> Any:
        await self.io.acquire()  # clean: released in the finally
        try:
            return await fn()
        finally:
            self.io.release()

    async def throttled_if(self, ready: bool, fn: Callable[[], Awaitable[Any]]) -> Any:
        await self.io.acquire()  # leak: not ready means an early None with the permit held
        if not ready:
            return None
        try:
            return await fn()
        finally:
            self.io.release()

    async def checksum(self, block: int) -> float:
        page = await self.pool.acquire_page()  # clean: near miss, released by the finally on each of the returns
        try:
            if block >= self.gpu.shape[0]:
                return 0.0
            self.pool.store[page].copy_(self.gpu[block].flatten())
            return float(self.pool.store[page].sum())
        finally:
            await self.pool.release_page(page)

    async def checksum_many(self, blocks: List[int]) -> List[float]:
        out = []
        for b in blocks:
            page = self.pool.acquire_page_nowait()  # leak: a block out of range breaks out of the loop with the page
            if page is None:
                await asyncio.sleep(0.001)
                continue
            if b >= self.gpu.shape[0]:
                break
            self.pool.store[page].copy_(self.gpu[b].flatten())
            out.append(float(self.pool.store[page].sum()))
            await self.pool.release_page(page)
        return out

    async def producer(self, blocks: List[int]) -> None:
        for b in blocks:
            page = await self.pool.acquire_page()  # clean: travels through the queue, the consumer releases it
            self.pool.store[page].copy_(self.gpu[b].flatten())
            await self.queue.put((b, page))
        await self.queue.put(None)

    async def consumer(self, sink: Callable[[int, torch.Tensor], None]) -> int:
        n = 0
        while True:
            item = await self.queue.get()
            if item is None:
                return n
            block, page = item
            sink(block, self.pool.store[page])
            await self.pool.release_page(page)
            n += 1

    async def offload_pair(self, kb: int, vb: int) -> Optional[Tuple[int, int]]:
        if kb in self.where or vb in self.where:
            return None
        kp = self.pool.acquire_page_nowait()  # leak: kept when the second page cannot be had
        if kp is None:
            return None
        vp = self.pool.acquire_page_nowait()  # clean: moved into the where table with kp
        if vp is None:
            return None
        self.pool.store[kp].copy_(self.gpu[kb].flatten())
        self.pool.store[vp].copy_(self.gpu[vb].flatten())
        self.where[kb], self.where[vb] = kp, vp
        return kp, vp

    async def reserve_pair(self) -> Optional[Tuple[int, int]]:
        a = self.pool.acquire_page_nowait()  # clean: released when b is missing, else handed to the caller
        if a is None:
            return None
        b = self.pool.acquire_page_nowait()  # clean: handed to the caller with a
        if b is None:
            await self.pool.release_page(a)
            return None
        return a, b

    async def swap_pages(self, x: int, y: int) -> bool:
        pair = await self.reserve_pair()  # leak: only the first page of the pair is released
        if pair is None:
            return False
        tmp, _ = pair
        self.pool.store[tmp].copy_(self.gpu[x].flatten())
        self.gpu[x].copy_(self.gpu[y])
        self.gpu[y].copy_(self.pool.store[tmp].view_as(self.gpu[y]))
        await self.pool.release_page(tmp)
        return True


async def pump(off: Offloader, blocks: List[int]) -> int:
    seen: List[int] = []
    task = asyncio.create_task(off.producer(blocks))
    n = await off.consumer(lambda b, _: seen.append(b))
    await task
    logger.debug("offloaded %s", seen)
    return n
