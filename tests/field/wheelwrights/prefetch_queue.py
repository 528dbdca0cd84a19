"""Prefetching of training batches through a fixed ring of pinned staging tensors.

The reader thread takes an empty staging tensor, fills it and queues it as full.  The
consumer uploads it and puts it back among the empty ones.  If one gets lost the ring
is a tensor shorter for the rest of the epoch.
"""
from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator

import torch


class Closed(Exception):
    pass


class StagingRing:
    def __init__(self, depth: int, shape: tuple[int, ...]) -> None:
        self.empties: queue.Queue[torch.Tensor] = queue.Queue()
        self.depth = depth
        self.closed = threading.Event()
        for _ in range(depth):
            self.empties.put(torch.empty(shape, pin_memory=True))

    def obtain(self, timeout: float | None = None) -> torch.Tensor:
        try:
            buf = self.empties.get(timeout=timeout)  # clean: near miss, put back before Closed is raised
        except queue.Empty:
            raise TimeoutError from None
        if self.closed.is_set():
            self.empties.put(buf)
            raise Closed
        return buf

    def obtain_zeroed(self) -> torch.Tensor | None:
        buf = self.empties.get()  # leak: lost when the ring has been closed meanwhile
        if self.closed.is_set():
            return None
        return buf.zero_()

    def try_obtain(self) -> torch.Tensor | None:
        try:
            return self.empties.get_nowait()  # clean: returned to the caller
        except queue.Empty:
            return None

    def recycle(self, buf: torch.Tensor) -> None:
        self.empties.put(buf)


@dataclass
class Ready:
    index: int
    buf: torch.Tensor
    rows: int
    labels: Any = None


class Reader(threading.Thread):
    def __init__(self, ring: StagingRing, source: Iterable, full: queue.Queue) -> None:
        super().__init__(daemon=True)
        self.ring = ring
        self.source = source
        self.full = full
        self.stop = threading.Event()
        self.skipped = 0

    def run(self) -> None:
        for i, rec in enumerate(self.source):
            if self.stop.is_set():
                break
            buf = self.ring.obtain()  # leak: continue on an undecodable record skips recycle
            try:
                rows = self.decode(rec, buf)
            except ValueError:
                self.skipped += 1
                continue
            self.full.put(Ready(i, buf, rows))
        self.full.put(None)

    @staticmethod
    def decode(rec, buf: torch.Tensor) -> int:
        feats = rec["features"]
        if len(feats) > buf.shape[0]:
            raise ValueError("record too long")
        buf[: len(feats)].copy_(torch.as_tensor(feats))
        return len(feats)


class CarefulReader(Reader):
    def run(self) -> None:
        spare: torch.Tensor | None = None
        for i, rec in enumerate(self.source):
            if self.stop.is_set():
                break
            if spare is None:
                spare = self.ring.obtain()  # clean: near miss, a rejected record keeps it as the spare, recycled at the end
            try:
                rows = self.decode(rec, spare)
            except ValueError:
                self.skipped += 1
                continue
            self.full.put(Ready(i, spare, rows))
            spare = None
        if spare is not None:
            self.ring.recycle(spare)
        self.full.put(None)


class LabelledReader(Reader):
    def __init__(self, ring, label_ring: StagingRing, source, full) -> None:
        super().__init__(ring, source, full)
        self.label_ring = label_ring

    def run(self) -> None:
        for i, rec in enumerate(self.source):
            x = self.ring.obtain()  # leak: not recycled when the label ring times out
            try:
                y = self.label_ring.obtain(timeout=1.0)  # clean: sent with the item, or recycled for a bad label
            except TimeoutError:
                self.skipped += 1
                continue
            feats = torch.as_tensor(rec["features"])[: x.shape[0]]
            rows = feats.shape[0]
            label = rec.get("label")
            if label is None:
                self.label_ring.recycle(y)
                self.ring.recycle(x)
                continue
            x[:rows].copy_(feats)
            y[:rows].fill_(label)
            self.full.put(Ready(i, x, rows, y))
        self.full.put(None)


class Prefetcher:
    def __init__(self, source: Iterable, depth: int, shape: tuple[int, ...], device: torch.device) -> None:
        self.ring = StagingRing(depth, shape)
        self.full: queue.Queue[Ready | None] = queue.Queue()
        self.device = device
        self.reader = CarefulReader(self.ring, source, self.full)

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.reader.start()
        ended = False
        try:
            while True:
                item = self.full.get()
                if item is None:
                    ended = True
                    break
                try:
                    out = item.buf[: item.rows].to(self.device)
                finally:
                    self.ring.recycle(item.buf)
                yield out
        finally:
            self.reader.stop.set()
            while not ended:
                item = self.full.get()
                if item is None:
                    ended = True
                else:
                    self.ring.recycle(item.buf)


def consume_labelled(reader: LabelledReader, step: Callable[[torch.Tensor, torch.Tensor], None]) -> int:
    n = 0
    while (item := reader.full.get()) is not None:
        try:
            step(item.buf[: item.rows], item.labels[: item.rows])
        finally:
            reader.ring.recycle(item.buf)
            reader.label_ring.recycle(item.labels)
        n += 1
    return n


class Shuffler:
    """Holds a few staged batches and emits them in random order."""

    def __init__(self, ring: StagingRing, width: int) -> None:
        self.ring = ring
        self.width = width
        self.held: list[Ready] = []

    def offer(self, i: int, data: torch.Tensor) -> bool:
        buf = self.ring.try_obtain()  # clean: near miss, held in self.held until emit() or flush()
        if buf is None:
            return False
        buf[: data.shape[0]].copy_(data)
        self.held.append(Ready(i, buf, data.shape[0]))
        return True

    def emit(self, device: torch.device) -> torch.Tensor:
        j = int(torch.randint(len(self.held), ()))
        item = self.held.pop(j)
        out = item.buf[: item.rows].to(device)
        self.ring.recycle(item.buf)
        return out

    def flush(self) -> None:
        for item in self.held:
            self.ring.recycle(item.buf)
        self.held = []


class Window:
    """Sliding window over the last few staged batches."""

    def __init__(self, ring: StagingRing, size: int) -> None:
        self.ring = ring
        self.size = size
        self.items: list[torch.Tensor] = []

    def push(self, data: torch.Tensor) -> None:
        buf = self.ring.obtain()  # leak: the oldest tensor is sliced off the window and never recycled
        buf[: data.shape[0]].copy_(data)
        self.items.append(buf)
        if len(self.items) > self.size:
            self.items = self.items[1:]

    def mean(self) -> torch.Tensor:
        acc = self.ring.obtain()  # clean: recycled in finally
        try:
            torch.mean(torch.stack(self.items), 0, out=acc)
            return acc.clone()
        finally:
            self.ring.recycle(acc)

    def close(self) -> None:
        while self.items:
            self.ring.recycle(self.items.pop())


def staged(ring: StagingRing, parts: Iterable[torch.Tensor], fill: Callable) -> Iterator[torch.Tensor]:
    buf = ring.obtain()  # leak: a part that is too large ends the generator before recycle
    for part in parts:
        if part.shape[0] > buf.shape[0]:
            return
        fill(buf, part)
        yield buf[: part.shape[0]]
    ring.recycle(buf)


def staged_pairs(ring: StagingRing, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[torch.Tensor]:
    a = ring.obtain()  # clean: recycled in the outer finally
    try:
        b = ring.try_obtain()  # clean: near miss, recycled in the finally when there is one
        try:
            for x, y in pairs:
                a[: x.shape[0]].copy_(x)
                if b is not None:
                    b[: y.shape[0]].copy_(y)
                    yield a[: x.shape[0]] * b[: y.shape[0]]
                else:
                    yield a[: x.shape[0]] * y
        finally:
            if b is not None:
                ring.recycle(b)
    finally:
        ring.recycle(a)
