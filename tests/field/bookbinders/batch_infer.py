"""Offline batch inference: pinned staging buffers on the way in, device slabs on the way out."""
from __future__ import annotations

import bisect
import contextlib
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Callable, Iterable, Iterator, Optional

import torch


class ItemTooLong(ValueError):
    pass


@dataclass
class Item:
    key: str
    tokens: list[int]


@dataclass
class Staging:
    bucket: int
    tensor: torch.Tensor


@dataclass
class Stats:
    batches: int = 0
    skipped: int = 0
    failed: int = 0


class StagingPool:
    def __init__(self, sizes: list[int], each: int) -> None:
        self._sizes = sorted(sizes)
        self._cv = threading.Condition()
        self._free = {s: [Staging(s, torch.empty(s, dtype=torch.int64, pin_memory=True)) for _ in range(each)]
                      for s in self._sizes}

    def take(self, n: int) -> Staging:
        """Waits for a buffer of the smallest size that holds n."""
        bucket = self._sizes[bisect.bisect_left(self._sizes, n)]
        with self._cv:
            while not self._free[bucket]:
                self._cv.wait()
            return self._free[bucket].pop()  # clean: goes to the caller

    def try_take(self, n: int) -> Optional[Staging]:
        with self._cv:
            for size in self._sizes:
                if size >= n and self._free[size]:
                    return self._free[size].pop()  # clean: goes to the caller
        return None

    def put(self, buf: Staging) -> None:
        with self._cv:
            self._free[buf.bucket].append(buf)
            self._cv.notify_all()

    @contextlib.contextmanager
    def borrow(self, n: int) -> Iterator[torch.Tensor]:
        buf = self.take(n)  # clean: put back when the block ends
        try:
            yield buf.tensor[:n]
        finally:
            self.put(buf)


class SlabStack:
    def __init__(self, device: str, width: int, count: int) -> None:
        self._mem = torch.empty((count, width), device=device)
        self._stack = list(range(count))

    def alloc(self) -> int:
        return self._stack.pop()  # clean: goes to the caller

    def free(self, slab: int) -> None:
        self._stack.append(slab)

    def row(self, slab: int) -> torch.Tensor:
        return self._mem[slab]


@dataclass
class Batch:
    items: list[Item]
    staging: Optional[Staging]
    outputs: Optional[torch.Tensor] = None
    offsets: list[int] = field(default_factory=list)

    def keys(self) -> list[str]:
        return [i.key for i in self.items]

    def release(self, pool: StagingPool) -> None:
        if self.staging is not None:
            pool.put(self.staging)
            self.staging = None


def stage(pool: StagingPool, items: list[Item], max_len: int = 4096) -> Batch:
    buf = pool.take(sum(len(i.tokens) for i in items))  # leak: ItemTooLong is raised between the take and the Batch
    at, offsets = 0, []
    for item in items:
        if len(item.tokens) > max_len:
            raise ItemTooLong(item.key)
        buf.tensor[at:at + len(item.tokens)] = torch.tensor(item.tokens)
        offsets.append(at)
        at += len(item.tokens)
    return Batch(items, buf, offsets=offsets)


class Runner:
    def __init__(self, pool: StagingPool, model: Callable, sink: Callable) -> None:
        self._pool, self._model, self._sink = pool, model, sink
        self.stats = Stats()

    def _forward(self, batch: Batch) -> Optional[torch.Tensor]:
        try:
            return self._model(batch.staging.tensor.to("cuda", non_blocking=True))
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            return None

    def run(self, source: Iterable[list[Item]]) -> Stats:
        for items in source:
            try:
                batch = stage(self._pool, items)  # leak: after an out-of-memory the batch is counted and passed over
            except ItemTooLong:
                self.stats.skipped += len(items)
                continue
            out = self._forward(batch)
            if out is None:
                self.stats.failed += len(items)
                continue
            batch.release(self._pool)
            self._sink(batch.keys(), out.cpu())
            self.stats.batches += 1
        return self.stats


class DoubleBuffer:
    def __init__(self, pool: StagingPool, source: Iterator[list[Item]]) -> None:
        self._pool, self._source = pool, source
        self._cur: Optional[Batch] = None
        self._next: Optional[Batch] = None

    def advance(self) -> Optional[Batch]:
        if self._cur is not None:
            self._cur.release(self._pool)
        self._cur, self._next = self._next, None
        items = next(self._source, None)
        if items is not None:
            self._next = stage(self._pool, items)  # clean: near miss, becomes _cur, and advance() or close() releases that
        return self._cur

    def close(self) -> None:
        for batch in (self._cur, self._next):
            if batch is not None:
                batch.release(self._pool)
        self._cur = self._next = None


class WriteBehind(threading.Thread):
    def __init__(self, pool: StagingPool, sink) -> None:
        super().__init__(daemon=True)
        self._pool, self._sink = pool, sink
        self.q: queue.Queue = queue.Queue(8)
        self.failed = 0

    def run(self) -> None:
        while True:
            batch = self.q.get()
            if batch is None:
                break
            try:
                self._sink.write(batch.keys(), batch.outputs)
            except OSError:
                self.failed += 1
                continue
            batch.release(self._pool)


def run_behind(pool: StagingPool, source: Iterable[list[Item]], model: Callable, writer: WriteBehind) -> int:
    for items in source:
        batch = stage(pool, items)  # leak: the writer doesn't release a batch whose write has failed
        batch.outputs = model(batch.staging.tensor).cpu()
        writer.q.put(batch)
    writer.q.put(None)
    writer.join()
    return writer.failed


def run_split(pool: StagingPool, model: Callable, items: list[Item], depth: int = 0) -> list:
    batch = stage(pool, items)  # clean: near miss, the finally releases it before the halves are tried
    try:
        return [model(batch.staging.tensor)]
    except torch.cuda.OutOfMemoryError:
        if depth > 4 or len(items) == 1:
            raise
    finally:
        batch.release(pool)
    mid = len(items) // 2
    return run_split(pool, model, items[:mid], depth + 1) + run_split(pool, model, items[mid:], depth + 1)


def warmup(pool: StagingPool, model: Callable, sizes: list[int]) -> None:
    buf = None
    for n in sizes:
        buf = pool.try_take(n)  # leak: bound anew for every size, only the last one is put back
        if buf is None:
            continue
        model(buf.tensor[:n].zero_())
    if buf is not None:
        pool.put(buf)


class ScoreSheet:
    def __init__(self, slabs: SlabStack, sink) -> None:
        self._slabs, self._sink = slabs, sink
        self._slab = slabs.alloc()  # leak: close() frees it only when something was written
        self._dirty = False

    def write(self, at: int, values: torch.Tensor) -> None:
        self._slabs.row(self._slab)[at:at + len(values)] = values
        self._dirty = True

    def close(self) -> None:
        if self._dirty:
            self._sink(self._slabs.row(self._slab).cpu())
            self._slabs.free(self._slab)
            self._dirty = False


def score(slabs: SlabStack, sink, batches: Iterable[torch.Tensor]) -> None:
    sheet = ScoreSheet(slabs, sink)  # clean: closed in the finally
    try:
        for n, values in enumerate(batches):
            sheet.write(n * len(values), values)
    finally:
        sheet.close()


def bandwidth(pool: StagingPool, n: int) -> float:
    with pool.borrow(n) as host:  # clean: the context manager puts it back
        t0 = time.perf_counter()
        host.to("cuda")
        return n * 8 / (time.perf_counter() - t0)


def contention(pool: StagingPool, sizes: list[int]) -> int:
    bufs = [pool.try_take(n) for n in sizes]  # clean: near miss, every one that isn't None is put back
    got = [b for b in bufs if b is not None]
    for b in got:
        pool.put(b)
    return len(got)
