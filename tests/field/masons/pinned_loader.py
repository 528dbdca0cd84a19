"""Training data loader that stages batches in pinned host buffers."""
from __future__ import annotations

import queue
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Dict, Iterable, Iterator, List, Optional

import torch


@dataclass
class PinnedBuffer:
    index: int
    tensor: torch.Tensor

    def view(self, n: int) -> torch.Tensor:
        return self.tensor[:n]


class PinnedPool:
    def __init__(self, count: int, numel: int) -> None:
        pin = torch.cuda.is_available()
        self._free: "queue.Queue[PinnedBuffer]" = queue.Queue()
        for i in range(count):
            self._free.put(PinnedBuffer(i, torch.empty(numel, dtype=torch.int64, pin_memory=pin)))

    def acquire(self, timeout: Optional[float] = None) -> Optional[PinnedBuffer]:
        try:
            return self._free.get(timeout=timeout)
        except queue.Empty:
            return None

    def release(self, buf: PinnedBuffer) -> None:
        self._free.put(buf)


@dataclass
class StagedBatch:
    buf: PinnedBuffer
    length: int
    mask_buf: Optional[PinnedBuffer] = None


class BatchStager:
    def __init__(self, pool: PinnedPool, max_len: int, device: torch.device) -> None:
        self.pool = pool
        self.max_len = max_len
        self.device = device
        self.ready: "queue.Queue[Optional[StagedBatch]]" = queue.Queue(maxsize=8)
        self._carry: Optional[PinnedBuffer] = None
        self._by_rank: Dict[int, PinnedBuffer] = {}
        self._stop = threading.Event()

    def stage(self, ids: List[int]) -> Optional[StagedBatch]:
        buf = self.pool.acquire(timeout=1.0)  # leak: an empty sample returns None and the buffer stays out
        if buf is None:
            return None
        if not ids:
            return None
        n = min(len(ids), self.max_len)
        buf.view(n).copy_(torch.tensor(ids[:n]))
        return StagedBatch(buf, n)

    def stage_masked(self, ids: List[int], mask: List[int]) -> Optional[StagedBatch]:
        buf = self.pool.acquire(timeout=1.0)  # clean: near miss, released when the mask buffer is not to be had
        if buf is None:
            return None
        mask_buf = self.pool.acquire(timeout=0.1)  # clean: leaves in the StagedBatch, retire() releases both
        if mask_buf is None:
            self.pool.release(buf)
            return None
        n = min(len(ids), self.max_len)
        buf.view(n).copy_(torch.tensor(ids[:n]))
        mask_buf.view(n).copy_(torch.tensor(mask[:n]))
        return StagedBatch(buf, n, mask_buf)

    def retire(self, batch: StagedBatch) -> None:
        self.pool.release(batch.buf)
        if batch.mask_buf is not None:
            self.pool.release(batch.mask_buf)

    def producer(self, samples: Iterable[List[int]]) -> None:
        for ids in samples:
            if self._stop.is_set():
                break
            if not ids:
                continue
            batch = self.stage(ids)  # clean: put on the ready queue, the consumer retires it
            if batch is None:
                continue
            self.ready.put(batch)
        self.ready.put(None)

    def masked_producer(self, samples: Iterable[tuple[List[int], List[int]]]) -> None:
        for ids, mask in samples:
            batch = self.stage_masked(ids, mask)  # leak: the stop check breaks after staging, before the put
            if batch is None:
                continue
            if self._stop.is_set():
                break
            self.ready.put(batch)
        self.ready.put(None)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            batch = self.ready.get()
            if batch is None:
                return
            out = batch.buf.view(batch.length).to(self.device, copy=True)
            self.retire(batch)
            yield out

    def drain(self) -> int:
        self._stop.set()
        dropped = 0
        while True:
            try:
                batch = self.ready.get_nowait()
            except queue.Empty:
                return dropped
            if batch is not None:
                self.retire(batch)
                dropped += 1

    def pack(self, docs: Iterable[List[int]]) -> Iterator[StagedBatch]:
        """Packs documents into full buffers; the consumer retires what it gets."""
        buf = self.pool.acquire()  # leak: with no documents nothing is yielded and the buffer stays out
        used = 0
        for doc in docs:
            n = min(len(doc), self.max_len)
            if used + n > self.max_len:
                yield StagedBatch(buf, used)
                buf = self.pool.acquire()  # leak: a tail shorter than 2 tokens is not yielded and not released
                used = 0
            buf.tensor[used:used + n].copy_(torch.tensor(doc[:n]))
            used += n
        if used >= 2:
            yield StagedBatch(buf, used)

    @contextmanager
    def scratch(self) -> Iterator[Optional[PinnedBuffer]]:
        buf = self.pool.acquire(timeout=0.5)  # clean: the finally gives it back when there was one
        try:
            yield buf
        finally:
            if buf is not None:
                self.pool.release(buf)

    def checksum(self, ids: List[int]) -> int:
        with self.scratch() as buf:  # clean: near miss, the early return is inside the context manager, which releases
            if buf is None:
                return sum(ids)
            n = min(len(ids), self.max_len)
            buf.view(n).copy_(torch.tensor(ids[:n]))
            return int(buf.view(n).sum())

    def hold_carry(self, ids: List[int]) -> None:
        if self._carry is None:
            self._carry = self.pool.acquire()  # clean: near miss, only when empty, flushed in close
        self._carry.view(len(ids)).copy_(torch.tensor(ids))

    def bind_rank(self, rank: int) -> PinnedBuffer:
        old = self._by_rank.pop(rank, None)
        if old is not None:
            self.pool.release(old)
        self._by_rank[rank] = self.pool.acquire()  # leak: close() flushes the carry only, never the rank table
        return self._by_rank[rank]

    def warmup(self, n: int) -> int:
        held = [self.pool.acquire(timeout=0.01) for _ in range(n)]  # clean: near miss, the Nones are skipped and the rest released
        got = 0
        for buf in held:
            if buf is None:
                continue
            buf.tensor.zero_()
            got += 1
            self.pool.release(buf)
        return got

    def close(self) -> None:
        self.drain()
        if self._carry is not None:
            self.pool.release(self._carry)
            self._carry = None
