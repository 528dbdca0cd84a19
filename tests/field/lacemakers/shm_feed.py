"""Shared-memory segments between feature servers and trainers, filled by worker threads and futures."""
from __future__ import annotations

import concurrent.futures as cf
import logging
import queue
import threading
from typing import Callable, Iterator

import torch

log = logging.getLogger("shm_feed")


class Segment:
    def __init__(self, index: int, numel: int) -> None:
        self.index = index
        self.data = torch.zeros(numel).share_memory_()
        self.filled = 0


class SegmentPool:
    """A queue of segments; take() waits, put_back() returns."""

    def __init__(self, count: int, numel: int) -> None:
        self.numel = numel
        self._q: queue.Queue[Segment] = queue.Queue()
        for i in range(count):
            self._q.put(Segment(i, numel))

    def take(self, timeout: float | None = None) -> Segment | None:
        try:
            return self._q.get(timeout=timeout)  # clean: returned to the caller
        except queue.Empty:
            return None

    def take_sized(self, numel: int) -> Segment | None:
        seg = self._q.get()  # leak: a segment that is too small is dropped
        if seg.data.numel() < numel:
            log.error("batch of %d does not fit", numel)
            return None
        return seg

    def put_back(self, seg: Segment) -> None:
        seg.filled = 0
        self._q.put(seg)


class Feeder:
    def __init__(self, pool: SegmentPool, source, workers: int = 4) -> None:
        self.pool = pool
        self.source = source
        self._exec = cf.ThreadPoolExecutor(workers)
        self._ready: queue.Queue[Segment | None] = queue.Queue(maxsize=16)
        self._futures: dict[int, tuple[Segment, cf.Future]] = {}
        self._stop = threading.Event()

    def _fill(self, seg: Segment, key: str) -> Segment:
        rows = self.source.fetch(key)
        seg.data[: rows.numel()].copy_(rows.flatten())
        seg.filled = rows.numel()
        return seg

    def submit(self, key: str, on_batch: Callable[[torch.Tensor], None]) -> None:
        seg = self.pool.take()  # clean: near miss, the done callback puts it back whatever the outcome
        fut = self._exec.submit(self._fill, seg, key)

        def done(f: cf.Future) -> None:
            try:
                if f.exception() is None:
                    on_batch(seg.data[: seg.filled].clone())
            finally:
                self.pool.put_back(seg)

        fut.add_done_callback(done)

    def submit_logged(self, key: str, on_batch: Callable[[torch.Tensor], None]) -> None:
        seg = self.pool.take()  # leak: the callback returns on a failed fetch without putting back
        fut = self._exec.submit(self._fill, seg, key)

        def done(f: cf.Future) -> None:
            err = f.exception()
            if err is not None:
                log.warning("fetch of %s: %s", key, err)
                return
            on_batch(seg.data[: seg.filled].clone())
            self.pool.put_back(seg)

        fut.add_done_callback(done)

    def produce(self, keys: list[str]) -> None:
        for key in keys:
            if self._stop.is_set():
                break
            seg = self.pool.take()  # clean: near miss, put in _ready, and the consumer puts it back
            self._ready.put(self._fill(seg, key))
        self._ready.put(None)

    def produce_nonempty(self, keys: list[str]) -> None:
        for key in keys:
            seg = self.pool.take()  # leak: keys without rows go on to the next segment
            self._fill(seg, key)
            if seg.filled == 0:
                continue
            self._ready.put(seg)
        self._ready.put(None)

    def batches(self) -> Iterator[torch.Tensor]:
        while True:
            seg = self._ready.get()  # clean: put back in finally, also when the consumer stops
            if seg is None:
                return
            try:
                yield seg.data[: seg.filled]
            finally:
                self.pool.put_back(seg)

    def sample(self, key: str, n: int) -> torch.Tensor:
        seg = self.pool.take()  # leak: asking for more rows than there are raises past put_back
        self._fill(seg, key)
        if n > seg.filled:
            raise ValueError(f"{key} has {seg.filled} rows, {n} wanted")
        out = seg.data[:n].clone()
        self.pool.put_back(seg)
        return out

    def flush(self) -> None:
        while True:
            try:
                seg = self._ready.get_nowait()  # clean: put back at once
            except queue.Empty:
                return
            if seg is not None:
                self.pool.put_back(seg)

    def prefetch(self, step: int, key: str) -> bool:
        if step in self._futures:
            return True
        seg = self.pool.take(timeout=0.5)  # clean: near miss, kept beside its future, and collect() or close() puts it back
        if seg is None:
            return False
        self._futures[step] = (seg, self._exec.submit(self._fill, seg, key))
        return True

    def collect(self, step: int) -> torch.Tensor:
        seg, fut = self._futures.pop(step)
        try:
            fut.result()
            return seg.data[: seg.filled].clone()
        finally:
            self.pool.put_back(seg)

    def fetch_two(self, left: str, right: str) -> torch.Tensor | None:
        a = self.pool.take(timeout=1.0)  # leak: stays out when the second wait times out
        if a is None:
            return None
        b = self.pool.take(timeout=1.0)  # clean: put back below
        if b is None:
            return None
        self._fill(a, left)
        self._fill(b, right)
        n = min(a.filled, b.filled)
        out = torch.stack([a.data[:n], b.data[:n]])
        self.pool.put_back(a)
        self.pool.put_back(b)
        return out

    def close(self) -> None:
        self._stop.set()
        self._exec.shutdown(wait=True)
        while self._futures:
            _, (seg, _) = self._futures.popitem()
            self.pool.put_back(seg)
        self.flush()
