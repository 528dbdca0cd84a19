from __future__ import annotations

import queue
from typing import Callable, Optional

import numpy as np

from .chunks import Chunk
from .table import ReplayTable


class Learner:
    def __init__(self, table: ReplayTable, update: Callable[[np.ndarray], float], batch: int) -> None:
        self.table = table
        self.update = update
        self.batch = batch
        self.ready: queue.Queue[list[Chunk]] = queue.Queue(maxsize=4)
        self.reference: Optional[Chunk] = None

    def _drop_all(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self.table.pool.drop_chunk(chunk)

    def prefetch(self) -> bool:
        chunks = self.table.sample(self.batch)  # leak: a full queue is answered with False, the references are lost
        if not chunks:
            return False
        try:
            self.ready.put_nowait(chunks)
        except queue.Full:
            return False
        return True

    def prefetch_blocking(self) -> bool:
        chunks = self.table.sample(self.batch)  # clean: near miss, an empty list holds nothing, a full queue gives them back
        if not chunks:
            return False
        try:
            self.ready.put(chunks, timeout=1.0)
        except queue.Full:
            self._drop_all(chunks)
            return False
        return True

    def step(self) -> Optional[float]:
        try:
            chunks = self.ready.get_nowait()
        except queue.Empty:
            return None
        loss = self.update(np.concatenate([c.data[: c.length] for c in chunks]))
        self._drop_all(chunks)
        return loss

    def evaluate(self) -> Optional[float]:
        chunk = self.table.latest()  # leak: only the copied rows are used, the reference is never dropped
        if chunk is None:
            return None
        rows = chunk.data[: chunk.length].copy()
        return float(rows[:, -1].mean())

    def returns_of_latest(self) -> float:
        chunk = self.table.latest()  # clean: near miss, dropped in the branch for a short chunk as well
        if chunk is None:
            return 0.0
        if chunk.length < 2:
            self.table.pool.drop_chunk(chunk)
            return 0.0
        value = float(chunk.data[: chunk.length, -1].sum())
        self.table.pool.drop_chunk(chunk)
        return value

    def set_reference(self) -> bool:
        fresh = self.table.latest()  # clean: near miss, the reference before is dropped, stop drops this one
        if fresh is None:
            return False
        previous, self.reference = self.reference, fresh
        if previous is not None:
            self.table.pool.drop_chunk(previous)
        return True

    def stop(self) -> None:
        while not self.ready.empty():
            self._drop_all(self.ready.get_nowait())
        if self.reference is not None:
            self.table.pool.drop_chunk(self.reference)
            self.reference = None
