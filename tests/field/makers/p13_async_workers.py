"""Async embedding service: page tasks, a page pool and concurrency limits."""
from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import AsyncIterator, Dict, List, Optional, Tuple

import torch

log = logging.getLogger("embed")


@dataclass
class Page:
    ident: int
    rows: torch.Tensor
    used: int = 0


class PagePool:
    """Oldest idle page first."""

    def __init__(self, pages: int, rows: int, dim: int) -> None:
        self._idle: "OrderedDict[int, Page]" = OrderedDict()
        for i in range(pages):
            self._idle[i] = Page(i, torch.empty(rows, dim))
        self._wake = asyncio.Event()

    def checkout_now(self) -> Optional[Page]:
        if not self._idle:
            return None
        _, page = self._idle.popitem(last=False)  # clean: returned after reset
        page.used = 0
        return page

    async def checkout(self) -> Page:
        while True:
            page = self.checkout_now()  # clean: near miss, loops only on None
            if page is not None:
                return page
            self._wake.clear()
            await self._wake.wait()

    def give_back(self, page: Page) -> None:
        self._idle[page.ident] = page
        self._wake.set()


class EmbeddingService:
    def __init__(self, model: torch.nn.Module, pool: PagePool, width: int) -> None:
        self.model = model
        self.pool = pool
        self._limit = asyncio.Semaphore(width)
        self._jobs: "asyncio.Queue[Tuple[Page, asyncio.Future]]" = asyncio.Queue()
        self._partial: Optional[Page] = None
        self.stats: Dict[str, int] = {}

    async def enqueue(self, rows: torch.Tensor) -> "asyncio.Future[torch.Tensor]":
        page = await self.pool.checkout()  # clean: near miss, travels in the job and the worker gives it back
        page.rows[: len(rows)].copy_(rows)
        page.used = len(rows)
        fut: "asyncio.Future[torch.Tensor]" = asyncio.get_running_loop().create_future()
        await self._jobs.put((page, fut))
        return fut

    async def worker(self) -> None:
        while True:
            page, fut = await self._jobs.get()  # leak: the page of a cancelled future is skipped
            if fut.cancelled():
                self.stats["cancelled"] = self.stats.get("cancelled", 0) + 1
                continue
            async with self._limit:  # clean: with block
                y = self.model(page.rows[: page.used]).detach().clone()
            self.pool.give_back(page)
            fut.set_result(y)

    async def append(self, row: torch.Tensor) -> None:
        if self._partial is None:
            self._partial = await self.pool.checkout()  # clean: near miss, kept in the field and given back by flush
        self._partial.rows[self._partial.used].copy_(row)
        self._partial.used += 1
        if self._partial.used == len(self._partial.rows):
            await self.flush()

    async def flush(self) -> Optional[torch.Tensor]:
        if self._partial is None:
            return None
        page, self._partial = self._partial, None
        y = self.model(page.rows[: page.used]).detach().clone()
        self.pool.give_back(page)
        return y

    async def embed_once(self, rows: torch.Tensor, timeout: float) -> Optional[torch.Tensor]:
        await self._limit.acquire()  # leak: the timeout handler returns without release
        try:
            y = await asyncio.wait_for(asyncio.to_thread(self.model, rows), timeout)
        except asyncio.TimeoutError:
            log.warning("timeout on %d rows", len(rows))
            return None
        self._limit.release()
        return y

    async def embed_small(self, rows: torch.Tensor) -> Optional[torch.Tensor]:
        if not rows.numel():
            return None
        await self._limit.acquire()  # clean: released in finally
        try:
            return self.model(rows).detach()
        finally:
            self._limit.release()

    async def stream(self, source: AsyncIterator[torch.Tensor]) -> AsyncIterator[torch.Tensor]:
        page = await self.pool.checkout()  # leak: a short item ends the stream before give_back
        async for rows in source:
            if len(rows) < 2:
                return
            page.rows[: len(rows)].copy_(rows)
            yield self.model(page.rows[: len(rows)]).detach()
        self.pool.give_back(page)


async def gather_pages(pool: PagePool, wanted: int) -> List[Page]:
    pages: List[Page] = []
    while len(pages) < wanted:
        page = pool.checkout_now()  # clean: near miss, the shortage gives all of them back
        if page is None:
            for p in pages:
                pool.give_back(p)
            return []
        pages.append(page)
    return pages


async def compare(service: EmbeddingService, a: torch.Tensor, b: torch.Tensor) -> Optional[float]:
    pages = await gather_pages(service.pool, 2)  # clean: both given back before the result
    if not pages:
        return None
    pages[0].rows[: len(a)].copy_(a)
    pages[1].rows[: len(b)].copy_(b)
    score = torch.cosine_similarity(pages[0].rows[: len(a)].mean(0), pages[1].rows[: len(b)].mean(0), dim=0)
    for p in pages:
        service.pool.give_back(p)
    return float(score)


async def prewarm(service: EmbeddingService, n: int) -> int:
    pages = await gather_pages(service.pool, n)  # leak: zeroed and counted, never given back
    for p in pages:
        p.rows.zero_()
    return len(pages)


async def main(service: EmbeddingService, batches: List[torch.Tensor]) -> List[torch.Tensor]:
    task = asyncio.create_task(service.worker())
    futures = [await service.enqueue(b) for b in batches]
    results = [await f for f in futures]
    task.cancel()
    return results
