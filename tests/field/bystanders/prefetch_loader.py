from __future__ import annotations

import queue
import threading
from typing import Any, Callable, Iterable, Iterator, List, Optional

import torch


class PinnedPool:
    def __init__(self, n: int, shape, dtype=torch.int64):
        self._lock = threading.Lock()
        self._free = [torch.empty(shape, dtype=dtype) for _ in range(n)]
        self._cv = threading.Condition(self._lock)

    def rent(self) -> torch.Tensor:
        with self._cv:
            while not self._free:
                self._cv.wait()
            return self._free.pop()

    def try_rent(self) -> Optional[torch.Tensor]:
        with self._cv:
            return self._free.pop() if self._free else None

    def give(self, t: torch.Tensor) -> None:
        with self._cv:
            self._free.append(t)
            self._cv.notify()


class Prefetcher:
    """Fills pinned batches in a thread; the trainer takes them with next_batch and hands them back."""

    _END = object()

    def __init__(self, source: Iterable[List[List[int]]], pool: PinnedPool, depth: int = 4, drop_last: bool = True):
        self.source = source
        self.pool = pool
        self.drop_last = drop_last
        self._q: queue.Queue = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _fill(self) -> None:
        for rows in self.source:
            if self._stop.is_set():
                break
            buf = self.pool.rent()  # leak: a short last batch is skipped after the buffer was rented
            if len(rows) < buf.shape[0] and self.drop_last:
                continue
            for i, row in enumerate(rows):
                buf[i, : len(row)] = torch.tensor(row)
            self._q.put(buf)
        self._q.put(self._END)

    def next_batch(self) -> Optional[torch.Tensor]:
        item = self._q.get()
        return None if item is self._END else item

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            batch = self.next_batch()  # clean: given back before the copy is yielded
            if batch is None:
                return
            copy = batch.clone()
            self.pool.give(batch)
            yield copy

    def close(self) -> None:
        self._stop.set()
        while True:
            item = self._q.get()
            if item is self._END:
                break
            self.pool.give(item)
        self._thread.join()


class Collator:
    def __init__(self, pool: PinnedPool, pad: int = 0):
        self.pool = pool
        self.pad = pad

    def collate(self, rows: List[List[int]]) -> torch.Tensor:
        buf = self.pool.rent()  # clean: returned to the caller
        buf.fill_(self.pad)
        for i, r in enumerate(rows):
            n = min(len(r), buf.shape[1])
            buf[i, :n] = torch.as_tensor(r[:n])
        return buf

    def to_device(self, rows: List[List[int]], device: str) -> torch.Tensor:
        buf = self.collate(rows)  # clean: given back after the copy
        out = buf.to(device, copy=True)
        self.pool.give(buf)
        return out

    def to_half(self, rows: List[List[int]]) -> torch.Tensor:
        buf = self.collate(rows)  # leak: buf is rebound to the narrower copy which is then returned
        buf = buf.to(torch.int32)
        return buf

    def lengths(self, rows: List[List[int]]) -> List[int]:
        batch = self.collate(rows)  # leak: only the counts survive
        return (batch != self.pad).sum(dim=1).tolist()

    def masked(self, rows: List[List[int]], p: float) -> torch.Tensor:
        batch = self.collate(rows)  # clean: near miss, in-place masking and a view, then given back
        view = batch[: len(rows)]
        view[torch.rand(view.shape) < p] = self.pad
        out = view.clone()
        self.pool.give(batch)
        return out

    def try_collate(self, rows: List[List[int]], fallback: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        buf = self.pool.try_rent()  # clean: near miss, the fallback runs only without a buffer
        if buf is None:
            return fallback(rows)
        for i, r in enumerate(rows):
            buf[i, : len(r)] = torch.as_tensor(r)
        out = buf.clone()
        self.pool.give(buf)
        return out

    def try_many(self, groups: List[List[List[int]]]) -> List[torch.Tensor]:
        bufs = []
        for rows in groups:
            b = self.pool.try_rent()  # clean: near miss, those in bufs are given back after the break
            if b is None:
                break
            for i, r in enumerate(rows):
                b[i, : len(r)] = torch.as_tensor(r)
            bufs.append(b)
        result = [b.clone() for b in bufs]
        while bufs:
            self.pool.give(bufs.pop())
        return result
