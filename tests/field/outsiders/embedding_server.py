"""Embedding service with micro batching. Input rows come from a pool and follow the task through the queue."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import torch

logger = logging.getLogger(__name__)


@dataclass
class ServiceConfig:
    max_batch: int = 32
    max_len: int = 512
    rows: int = 128
    linger_ms: float = 2.0


class RowPool:
    def __init__(self, rows: int, width: int) -> None:
        self.data = torch.zeros(rows, width, dtype=torch.long)
        self._free = asyncio.LifoQueue()
        for i in range(rows):
            self._free.put_nowait(i)

    async def claim_row(self) -> int:
        return await self._free.get()

    def claim_row_nowait(self) -> int | None:
        return None if self._free.empty() else self._free.get_nowait()

    def drop_row(self, row: int) -> None:
        self.data[row].zero_()
        self._free.put_nowait(row)


@dataclass
class Task:
    row: int
    length: int
    future: asyncio.Future = field(repr=False)


class EmbeddingService:
    def __init__(self, cfg: ServiceConfig, model: torch.nn.Module) -> None:
        self.cfg = cfg
        self.model = model
        self.pool = RowPool(cfg.rows, cfg.max_len)
        self.queue: asyncio.Queue[Task] = asyncio.Queue()
        self.model_lock = asyncio.Lock()
        self.cache: dict[tuple[int, ...], torch.Tensor] = {}

    async def embed(self, ids: list[int]) -> torch.Tensor:
        row = await self.pool.claim_row()  # clean: the batch loop drops the task's row
        self.pool.data[row, : len(ids)] = torch.tensor(ids)
        fut = asyncio.get_running_loop().create_future()
        await self.queue.put(Task(row, len(ids), fut))
        return await fut

    async def embed_cached(self, ids: list[int]) -> torch.Tensor:
        row = await self.pool.claim_row()  # leak: a cached embedding is returned while the row stays claimed
        key = tuple(ids)
        if key in self.cache:
            return self.cache[key]
        self.pool.data[row, : len(ids)] = torch.tensor(ids)
        fut = asyncio.get_running_loop().create_future()
        await self.queue.put(Task(row, len(ids), fut))
        self.cache[key] = await fut
        return self.cache[key]

    async def embed_now(self, ids: list[int]) -> torch.Tensor | None:
        row = self.pool.claim_row_nowait()  # clean: near miss, inputs over the limit drop the row before the return
        if row is None:
            return None
        if len(ids) > self.cfg.max_len:
            self.pool.drop_row(row)
            return None
        self.pool.data[row, : len(ids)] = torch.tensor(ids)
        async with self.model_lock:
            emb = self.model(self.pool.data[row: row + 1, : len(ids)])[0]
        self.pool.drop_row(row)
        return emb

    async def embed_pair(self, a: list[int], b: list[int]) -> float | None:
        ra = self.pool.claim_row_nowait()  # leak: with only one row left the function returns None and keeps it
        if ra is None:
            return None
        rb = self.pool.claim_row_nowait()  # clean: dropped with the first
        if rb is None:
            return None
        self.pool.data[ra, : len(a)] = torch.tensor(a)
        self.pool.data[rb, : len(b)] = torch.tensor(b)
        ea, eb = self.model(self.pool.data[[ra, rb]])
        self.pool.drop_row(ra)
        self.pool.drop_row(rb)
        return float(torch.cosine_similarity(ea, eb, dim=0))

    async def _collect(self) -> list[Task]:
        tasks = [await self.queue.get()]
        deadline = asyncio.get_running_loop().time() + self.cfg.linger_ms / 1000
        while len(tasks) < self.cfg.max_batch:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0 or self.queue.empty():
                break
            tasks.append(self.queue.get_nowait())
        return tasks

    async def batch_loop(self) -> None:
        while True:
            tasks = await self._collect()
            await self.model_lock.acquire()  # clean: released in the finally
            try:
                out = self.model(self.pool.data[[t.row for t in tasks]])
            finally:
                self.model_lock.release()
            for t, emb in zip(tasks, out):
                self.pool.drop_row(t.row)
                if not t.future.done():
                    t.future.set_result(emb)

    async def reload(self, state: dict[str, torch.Tensor]) -> bool:
        await self.model_lock.acquire()  # leak: a state with other keys is refused under the lock
        if state.keys() != self.model.state_dict().keys():
            logger.error("state dict does not fit")
            return False
        self.model.load_state_dict(state)
        self.model_lock.release()
        return True

    async def warmup(self) -> None:
        for n in (1, 16, self.cfg.max_len):
            row = await self.pool.claim_row()  # clean: dropped each time
            self.model(self.pool.data[row: row + 1, :n])
            self.pool.drop_row(row)
