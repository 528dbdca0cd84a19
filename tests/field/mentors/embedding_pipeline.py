"""Input pipeline for sharded embeddings: batches are staged, distributed and run in overlapping steps."""
from __future__ import annotations

import queue
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Iterator, Optional

import torch
from torch import nn


@dataclass(eq=False)
class StageBuffer:
    ids: torch.Tensor
    offsets: torch.Tensor
    used: int = 0

    def fill(self, batch: "SparseBatch") -> None:
        self.used = batch.ids.numel()
        self.ids[: self.used].copy_(batch.ids)
        self.offsets[: batch.offsets.numel()].copy_(batch.offsets)


@dataclass
class SparseBatch:
    ids: torch.Tensor
    offsets: torch.Tensor
    label: torch.Tensor


@dataclass
class InFlight:
    batch: SparseBatch
    buf: StageBuffer
    row: int = -1


class StagePool:
    def __init__(self, depth: int, max_ids: int, max_bags: int) -> None:
        self._q: queue.SimpleQueue[StageBuffer] = queue.SimpleQueue()
        for _ in range(depth):
            self._q.put(StageBuffer(torch.empty(max_ids, dtype=torch.int64), torch.empty(max_bags + 1, dtype=torch.int64)))

    def get(self, block: bool = True, timeout: Optional[float] = None) -> Optional[StageBuffer]:
        try:
            return self._q.get(block, timeout)
        except queue.Empty:
            return None

    def put(self, buf: StageBuffer) -> None:
        buf.used = 0
        self._q.put(buf)


class CacheRows:
    """Rows of the device cache, by slot; reserve and unreserve from any thread."""

    def __init__(self, n: int) -> None:
        self._mu = threading.Lock()
        self._rows = deque(range(n))

    def reserve(self) -> int:
        with self._mu:
            return self._rows.popleft() if self._rows else -1

    def unreserve(self, row: int) -> None:
        with self._mu:
            self._rows.append(row)


class TrainPipeline:
    def __init__(self, model: nn.Module, pool: StagePool, rows: CacheRows, depth: int = 2) -> None:
        self.model = model
        self.pool = pool
        self.rows = rows
        self.depth = depth
        self.inflight: deque[InFlight] = deque()
        self.hot_rows: dict[int, int] = {}

    def _stage(self, batch: SparseBatch) -> Optional[InFlight]:
        buf = self.pool.get(block=False)  # clean: near miss, put back for an oversized batch, else in the result
        if buf is None:
            return None
        if batch.ids.numel() > buf.ids.numel():
            self.pool.put(buf)
            return None
        buf.fill(batch)
        return InFlight(batch, buf)

    def fill(self, it: Iterator[SparseBatch]) -> int:
        n = 0
        while len(self.inflight) < self.depth:
            batch = next(it, None)
            if batch is None:
                break
            item = self._stage(batch)  # clean: queued in inflight with its buffer
            if item is None:
                break
            self.inflight.append(item)
            n += 1
        return n

    def fill_filtered(self, it: Iterator[SparseBatch], min_ids: int) -> int:
        n = 0
        for batch in it:
            item = self._stage(batch)  # leak: the buffer of a batch that is too small goes with the `continue`
            if item is None:
                break
            if item.buf.used < min_ids:
                continue
            self.inflight.append(item)
            n += 1
            if len(self.inflight) >= self.depth:
                break
        return n

    def step(self) -> Optional[torch.Tensor]:
        if not self.inflight:
            return None
        item = self.inflight.popleft()
        out = self.model(item.buf.ids[: item.buf.used], item.buf.offsets[: item.batch.offsets.numel()])
        loss = nn.functional.binary_cross_entropy_with_logits(out, item.batch.label)
        if item.row >= 0:
            self.rows.unreserve(item.row)
        self.pool.put(item.buf)
        return loss

    def attach_rows(self) -> int:
        attached = 0
        for item in self.inflight:
            row = self.rows.reserve()  # leak: an item that has a row already gets another over it
            if row < 0:
                break
            item.row = row
            attached += 1
        return attached

    def attach_missing(self) -> int:
        attached = 0
        for item in self.inflight:
            if item.row >= 0:
                continue
            row = self.rows.reserve()  # clean: near miss, items with a row are skipped before; step and drain unreserve it
            if row < 0:
                break
            item.row = row
            attached += 1
        return attached

    def pin_hot(self, table_ids: list[int]) -> bool:
        got: list[int] = []
        for t in table_ids:
            if t in self.hot_rows:
                continue
            row = self.rows.reserve()  # clean: near miss, entered in hot_rows at once, and taken out again when refused
            if row < 0:
                for g in got:
                    self.rows.unreserve(self.hot_rows.pop(g))
                return False
            self.hot_rows[t] = row
            got.append(t)
        return True

    def rebalance(self, old: int, new: int) -> bool:
        row = self.rows.reserve()  # leak: returned from without unreserve when old is not hot
        if row < 0:
            return False
        prev = self.hot_rows.pop(old, None)
        if prev is None:
            return False
        self.rows.unreserve(prev)
        prior = self.hot_rows.pop(new, None)
        if prior is not None:
            self.rows.unreserve(prior)
        self.hot_rows[new] = row
        return True

    @contextmanager
    def scratch(self, timeout: float) -> Iterator[Optional[StageBuffer]]:
        buf = self.pool.get(timeout=timeout)  # clean: put back in finally
        try:
            yield buf
        finally:
            if buf is not None:
                self.pool.put(buf)

    def eval_batch(self, batch: SparseBatch) -> Optional[torch.Tensor]:
        with self.scratch(timeout=1.0) as buf:  # clean: near miss, the early return leaves the block in order
            if buf is None:
                return None
            buf.fill(batch)
            with torch.no_grad():
                return self.model(buf.ids[: buf.used], buf.offsets[: batch.offsets.numel()]).clone()

    def dedup(self, batch: SparseBatch) -> torch.Tensor:
        tmp = self.pool.get()  # leak: only the way with duplicates puts it back
        if tmp is None:
            return batch.ids
        tmp.fill(batch)
        uniq = torch.unique(tmp.ids[: tmp.used])
        if uniq.numel() == tmp.used:
            return batch.ids
        self.pool.put(tmp)
        return uniq

    def drain(self) -> None:
        while self.inflight:
            item = self.inflight.pop()
            if item.row >= 0:
                self.rows.unreserve(item.row)
            self.pool.put(item.buf)
        for row in self.hot_rows.values():
            self.rows.unreserve(row)
        self.hot_rows.clear()
