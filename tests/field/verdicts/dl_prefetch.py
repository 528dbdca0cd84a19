from __future__ import annotations

import queue
import threading
from typing import Any, Callable, Iterator, Sequence

import torch


class SlabPool(object):
    """Batch-sized slabs shared by the reader threads and the training loop."""

    def __init__(self, n: int, batch: int, shape: Sequence[int]) -> None:
        self._q: "queue.Queue[torch.Tensor]" = queue.Queue()
        self.batch = batch
        for _ in range(n):
            self._q.put(torch.empty((batch, *shape)))

    def alloc_slab(self, timeout: float | None = None) -> torch.Tensor:
        return self._q.get(timeout=timeout)

    def dealloc_slab(self, slab: torch.Tensor) -> None:
        self._q.put(slab)


class Prefetcher:
    _END = object()

    def __init__(self, dataset: Sequence[Any], pool: SlabPool, decode: Callable[[Any], torch.Tensor], depth: int = 2):
        self.dataset = dataset
        self.pool = pool
        self.decode = decode
        self.out: "queue.Queue[Any]" = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self.last_error: Exception | None = None

    def producer(self) -> None:
        b = self.pool.batch
        for start in range(0, len(self.dataset), b):
            if self._stop.is_set():
                break
            slab = self.pool.alloc_slab()  # clean: travels through the queue, consumer or drain gives it back
            for j, item in enumerate(self.dataset[start : start + b]):
                slab[j] = self.decode(item)
            self.out.put(slab)
        self.out.put(self._END)

    def producer_drop_last(self) -> None:
        b = self.pool.batch
        for start in range(0, len(self.dataset), b):
            items = self.dataset[start : start + b]
            slab = self.pool.alloc_slab()  # leak: the short last batch breaks out with its slab
            if len(items) < b:
                break
            for j, item in enumerate(items):
                slab[j] = self.decode(item)
            self.out.put(slab)
        self.out.put(self._END)

    def producer_tolerant(self) -> None:
        b = self.pool.batch
        for start in range(0, len(self.dataset), b):
            slab = self.pool.alloc_slab()  # leak: a decode error is recorded and the slab forgotten
            try:
                for j, item in enumerate(self.dataset[start : start + b]):
                    slab[j] = self.decode(item)
            except ValueError as e:
                self.last_error = e
                continue
            self.out.put(slab)
        self.out.put(self._END)

    def producer_lenient(self) -> None:
        b = self.pool.batch
        for start in range(0, len(self.dataset), b):
            slab = self.pool.alloc_slab()  # clean: near miss, error path deallocates before continue
            try:
                for j, item in enumerate(self.dataset[start : start + b]):
                    slab[j] = self.decode(item)
            except ValueError as e:
                self.last_error = e
                self.pool.dealloc_slab(slab)
                continue
            self.out.put(slab)
        self.out.put(self._END)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            slab = self.out.get()
            if slab is self._END:
                return
            try:
                yield slab
            finally:
                self.pool.dealloc_slab(slab)

    def drain(self) -> None:
        self._stop.set()
        while not self.out.empty():
            slab = self.out.get()
            if slab is not self._END:
                self.pool.dealloc_slab(slab)


def augment_batches(batches: Iterator[torch.Tensor], pool: SlabPool, flip: bool) -> Iterator[torch.Tensor]:
    for batch in batches:
        work = pool.alloc_slab()  # clean: near miss, deallocated in finally after the consumer resumes
        try:
            torch.add(batch, 0.0, out=work)
            if flip:
                work.copy_(work.flip(-1))
            yield work
        finally:
            pool.dealloc_slab(work)


def mixup(a: torch.Tensor, b: torch.Tensor, lam: float, pool: SlabPool) -> torch.Tensor:
    out = pool.alloc_slab()  # leak: lam * a replaces the slab by a new tensor
    out = lam * a
    out.add_(b, alpha=1 - lam)
    pool.dealloc_slab(out)
    return out.sum(0)


def mixup_into(a: torch.Tensor, b: torch.Tensor, lam: float, pool: SlabPool) -> torch.Tensor:
    out = pool.alloc_slab()  # clean: near miss, out= keeps the slab and the sum is a new tensor
    out = torch.lerp(b, a, lam, out=out)
    total = out.sum(0)
    pool.dealloc_slab(out)
    return total


def normalise(batch: torch.Tensor, pool: SlabPool, mean: float | None) -> torch.Tensor:
    slab = pool.alloc_slab()  # clean: ownership goes to the caller
    slab.copy_(batch)
    if mean is not None:
        slab -= mean
    return slab


def dataset_stats(batches: Sequence[torch.Tensor], pool: SlabPool) -> list[float]:
    stats = []
    for b in batches:
        s = normalise(b, pool, None)  # clean: deallocated each round
        stats.append(float(s.mean()))
        pool.dealloc_slab(s)
    return stats


def centred_norms(batches: Sequence[torch.Tensor], pool: SlabPool) -> list[float]:
    mean = dataset_stats(batches, pool)
    return [float(normalise(b, pool, m).norm()) for b, m in zip(batches, mean)]  # leak: slab used inside the expression and dropped
