"""Dynamic batching for the embedding service (asyncio)."""
import asyncio
import dataclasses
import logging
import time
import typing as tp

import numpy as np
import torch

LOGGER = logging.getLogger("embed.batcher")


@dataclasses.dataclass
class Ticket:
    text_ids: list[int]
    future: "asyncio.Future[np.ndarray]"
    row: int = -1
    enqueued: float = dataclasses.field(default_factory=time.monotonic)


class RowTable:
    """Input rows of the running model batch."""

    def __init__(self, rows: int, width: int):
        self.ids = torch.zeros(rows, width, dtype=torch.long)
        self._vacant: "asyncio.Queue[int]" = asyncio.Queue()
        for i in range(rows):
            self._vacant.put_nowait(i)

    async def claim(self) -> int:
        return await self._vacant.get()

    def claim_nowait(self) -> tp.Optional[int]:
        try:
            return self._vacant.get_nowait()
        except asyncio.QueueEmpty:
            return None

    def unclaim(self, row: int) -> None:
        self._vacant.put_nowait(row)


class Batcher:
    def __init__(self, model: tp.Callable[[torch.Tensor], torch.Tensor], rows: int = 32, width: int = 512):
        self.model = model
        self.width = width
        self.table = RowTable(rows, width)
        self.inbox: "asyncio.Queue[Ticket]" = asyncio.Queue()
        self.model_lock = asyncio.Lock()
        self.late: list[Ticket] = []

    def _fill(self, row: int, ids: list[int]) -> None:
        self.table.ids[row].zero_()
        self.table.ids[row, : len(ids)] = torch.tensor(ids)

    async def submit(self, ids: list[int]) -> np.ndarray:
        t = Ticket(ids, asyncio.get_running_loop().create_future())
        t.row = await self.table.claim()  # clean: carried by the ticket through the queue, run_once() unclaims
        self._fill(t.row, ids[: self.width])
        await self.inbox.put(t)
        return await t.future

    async def run_once(self, max_batch: int) -> int:
        batch = [await self.inbox.get()]
        while len(batch) < max_batch and not self.inbox.empty():
            batch.append(self.inbox.get_nowait())
        async with self.model_lock:
            out = self.model(self.table.ids[[t.row for t in batch]]).numpy()
        for t, vec in zip(batch, out):
            t.future.set_result(vec)
            self.table.unclaim(t.row)
        return len(batch)

    async def submit_short(self, ids: list[int]) -> tp.Optional[np.ndarray]:
        row = await self.table.claim()  # leak: texts which are too long return with the row claimed
        if len(ids) > self.width:
            LOGGER.info("text of %d tokens refused", len(ids))
            return None
        self._fill(row, ids)
        vec = self.model(self.table.ids[row: row + 1])[0].numpy().copy()
        self.table.unclaim(row)
        return vec

    async def submit_inline(self, ids: list[int]) -> tp.Optional[np.ndarray]:
        row = self.table.claim_nowait()  # clean: near miss, the raise for an empty text lies in the try
        if row is None:
            return None
        try:
            if not ids:
                raise ValueError("empty text")
            self._fill(row, ids[: self.width])
            return self.model(self.table.ids[row: row + 1])[0].numpy().copy()
        finally:
            self.table.unclaim(row)

    async def submit_group(self, texts: list[list[int]]) -> list[np.ndarray]:
        rows = [await self.table.claim() for _ in texts]  # clean: unclaimed one by one after the copy
        for r, ids in zip(rows, texts):
            self._fill(r, ids[: self.width])
        out = [v.copy() for v in self.model(self.table.ids[rows]).numpy()]
        for r in rows:
            self.table.unclaim(r)
        return out

    async def submit_group_unique(self, texts: list[list[int]]) -> int:
        rows: dict[tuple, int] = {}
        for ids in texts:
            rows[tuple(ids)] = await self.table.claim()  # leak: equal texts overwrite the row of the first
        self.model(self.table.ids[list(rows.values())])
        for r in rows.values():
            self.table.unclaim(r)
        return len(rows)

    async def submit_group_cached(self, texts: list[list[int]]) -> int:
        rows: dict[tuple, int] = {}
        for ids in texts:
            if tuple(ids) in rows:
                continue
            rows[tuple(ids)] = await self.table.claim()  # clean: near miss, known keys never get here
        for r in rows.values():
            self.table.unclaim(r)
        return len(rows)

    async def defer(self, t: Ticket) -> None:
        t.row = await self.table.claim()  # leak: expire_late() drops old tickets together with their rows
        self.late.append(t)

    def expire_late(self, max_age: float) -> int:
        now = time.monotonic()
        before = len(self.late)
        self.late = [t for t in self.late if now - t.enqueued < max_age]
        return before - len(self.late)

    async def flush_late(self) -> None:
        while self.late:
            t = self.late.pop()
            self.table.unclaim(t.row)
            t.future.cancel()

    async def reload(self, model: tp.Optional[tp.Callable]) -> bool:
        await self.model_lock.acquire()  # leak: no model, no release
        if model is None:
            return False
        self.model = model
        self.model_lock.release()
        return True

    async def warm(self, n: int) -> int:
        claimed = []
        while len(claimed) < n:
            row = self.table.claim_nowait()  # clean: near miss, break reaches the unclaim as well
            if row is None:
                break
            claimed.append(row)
        if claimed:
            self.model(self.table.ids[claimed])
        while claimed:
            self.table.unclaim(claimed.pop())
        return n

    async def latency(self) -> float:
        t0 = time.perf_counter()
        await self.table.claim()  # leak: the result is discarded
        return time.perf_counter() - t0
