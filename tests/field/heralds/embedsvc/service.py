from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from typing import AsyncIterator, Callable

from .batcher import Batcher, Vector
from .rows import Incompatible, RowPool, Saturated, WorkerLink, open_checked

log = logging.getLogger("embedsvc")


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b))


class EmbedService:
    def __init__(self, tokenise: Callable[..., list[int]], rows: int = 256, length: int = 512, hot: int = 16) -> None:
        self.rows = RowPool(rows, length)
        self.tokenise = tokenise
        self.hot_limit = hot
        self.hot: OrderedDict[str, int] = OrderedDict()
        self.link: WorkerLink | None = None
        self.side: WorkerLink | None = None
        self.batcher: Batcher | None = None
        self.task: asyncio.Task[None] | None = None

    async def start(self, paths: list[str], side_path: str | None = None) -> None:
        """Connect to the first worker that speaks our version."""
        for path in paths:
            try:
                self.link = await open_checked(path)  # clean: closed by stop
                break
            except (Incompatible, OSError) as exc:
                log.warning("worker %s: %r", path, exc)
        if self.link is None:
            raise RuntimeError("no worker")
        if side_path:
            self.side = await WorkerLink.open(side_path)  # leak: stop() closes link only
        self.batcher = Batcher(self.rows, self.link, self.tokenise)
        self.task = asyncio.create_task(self.batcher.loop())

    async def embed(self, text: str, timeout: float = 2.0) -> Vector | None:
        try:
            return await asyncio.wait_for(self.batcher.submit(text), timeout)
        except asyncio.TimeoutError:
            log.info("embed timed out")
            return None

    async def keep_hot(self, text: str) -> int:
        """Tokenise a frequent prompt once; returns its row."""
        key = hashlib.sha1(text.encode()).hexdigest()
        if key in self.hot:
            self.hot.move_to_end(key)
            return self.hot[key]
        row = self.rows.claim_nowait()  # leak: _shrink pops the oldest entries and discards their rows
        self.batcher._fill(row, text)
        self.hot[key] = row
        self._shrink()
        return row

    def _shrink(self) -> None:
        while len(self.hot) > self.hot_limit:
            key, row = self.hot.popitem(last=False)
            log.debug("%s (row %d) is not hot any more", key[:8], row)

    async def similarity(self, a: str, b: str) -> float:
        async with self.rows.row() as ra, self.rows.row() as rb:  # clean: both by async with
            self.batcher._fill(ra, a)
            self.batcher._fill(rb, b)
            reply = await self.link.call("embed", rows=[ra, rb])
            return dot(*reply["vectors"])

    async def ingest(self, docs: AsyncIterator[dict]) -> int:
        """Index a stream of documents on the side worker."""
        count = 0
        async for doc in docs:
            row = await self.rows.claim()  # leak: a document without text continues with the row claimed
            if not doc.get("text"):
                log.debug("%s is empty", doc.get("id"))
                continue
            self.batcher._fill(row, doc["text"])
            try:
                await (self.side or self.link).call("index", row=row, id=doc["id"])
                count += 1
            finally:
                await self.rows.free(row)
        return count

    async def ask_twice(self, text: str) -> tuple[Vector, Vector]:
        """Same text on both workers, to compare quantisations."""
        try:
            row = self.rows.claim_nowait()  # clean: near miss, Saturated falls back to claim, one of the two rows is freed by the finally
        except Saturated:
            row = await self.rows.claim()  # clean: freed by the finally
        try:
            self.batcher._fill(row, text)
            one = await self.link.call("embed", rows=[row])
            two = await self.side.call("embed", rows=[row]) if self.side else one
            return one["vectors"][0], two["vectors"][0]
        finally:
            await self.rows.free(row)

    async def stop(self) -> None:
        if self.batcher is not None:
            await self.batcher.stop()
        if self.task is not None:
            await self.task
        for key in list(self.hot):
            await self.rows.free(self.hot.pop(key))
        if self.link is not None:
            await self.link.close()
            self.link = None
