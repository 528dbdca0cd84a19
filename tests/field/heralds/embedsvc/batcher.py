"""Collects rows into batches."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Awaitable, Callable

from .rows import RowPool, WorkerLink

log = logging.getLogger("embedsvc.batcher")

Vector = list[float]


@dataclass(eq=False)
class Item:
    row: int
    future: asyncio.Future[Vector]
    ours: bool = True  # the batcher frees the row after the run


@dataclass(eq=False)
class Batcher:
    rows: RowPool
    link: WorkerLink
    tokenise: Callable[[str, "list[int] | None"], list[int]]
    max_batch: int = 32
    max_wait: float = 0.005
    pending: list[Item] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: bool = False

    def _fill(self, row: int, text: str) -> None:
        ids = self.tokenise(text, None)[: self.rows.ids.shape[1]]
        self.rows.ids[row, : len(ids)] = self.rows.ids.new_tensor(ids)

    def _enqueue(self, row: int, ours: bool) -> asyncio.Future[Vector]:
        future = asyncio.get_running_loop().create_future()
        if self.stopping:
            future.cancel()
            return future
        self.pending.append(Item(row, future, ours))
        self.wake.set()
        return future

    async def submit(self, text: str) -> Vector:
        row = await self.rows.claim()  # leak: after the timeout in EmbedService.embed the future is cancelled and _run drops the item with its row
        self._fill(row, text)
        return await self._enqueue(row, ours=True)

    async def submit_many(self, texts: list[str]) -> list[Vector]:
        rows = await self.rows.claim_many(len(texts))  # clean: near miss, marked as not ours for the batcher and freed here
        try:
            for row, text in zip(rows, texts):
                self._fill(row, text)
            return await asyncio.gather(*(self._enqueue(row, ours=False) for row in rows))
        finally:
            await self.rows.free(*rows)

    def submit_with(self, text: str, then: Callable[[Vector | None], Awaitable[None]]) -> None:
        """Fire and forget; `then` gets the vector."""
        row = self.rows.claim_nowait()  # clean: near miss, freed by the callback of the future whatever became of it
        self._fill(row, text)
        future = self._enqueue(row, ours=False)

        def done(f: asyncio.Future[Vector]) -> None:
            self.rows.free_soon(row)
            failed = f.cancelled() or f.exception()
            asyncio.ensure_future(then(None if failed else f.result()))

        future.add_done_callback(done)

    async def loop(self) -> None:
        while not self.stopping:
            await self.wake.wait()
            await asyncio.sleep(self.max_wait)
            batch, self.pending = self.pending[: self.max_batch], self.pending[self.max_batch:]
            if not self.pending:
                self.wake.clear()
            await self._run(batch)

    async def _run(self, batch: list[Item]) -> None:
        live = [item for item in batch if not item.future.cancelled()]
        if not live:
            return
        try:
            reply = await self.link.call("embed", rows=[item.row for item in live])
        except (OSError, ValueError) as exc:
            log.error("batch of %d: %s", len(live), exc)
            for item in live:
                if not item.future.done():
                    item.future.set_exception(RuntimeError("worker failed"))
        else:
            for item, vector in zip(live, reply["vectors"]):
                if not item.future.done():
                    item.future.set_result(vector)
        await self.rows.free(*(item.row for item in live if item.ours))

    async def stop(self) -> None:
        self.stopping = True
        self.wake.set()
        rest, self.pending = self.pending, []
        for item in rest:
            item.future.cancel()
            if item.ours:
                await self.rows.free(item.row)
