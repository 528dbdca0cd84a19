"""Data loader that collates into pinned host buffers."""
from __future__ import annotations

import queue
import threading
from typing import Any, Callable, Iterable, Iterator, List, Optional, Sequence, Tuple

try:
    import torch
except ImportError:
    torch = None

Sample = Tuple[List[int], int]


class PinnedBuffer:
    def __init__(self, nbytes: int) -> None:
        if torch is not None and torch.cuda.is_available():
            self.host: Any = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        else:
            self.host = bytearray(nbytes)
        self.rows = 0

    def collate(self, samples: Sequence[Sample]) -> None:
        self.rows = len(samples)
        for i, (tokens, _label) in enumerate(samples):
            self.host[i] = sum(tokens) % 256


class PinnedPool:
    """Blocking pool over a Queue."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._q: "queue.Queue[PinnedBuffer]" = queue.Queue(maxsize=count)
        for _ in range(count):
            self._q.put_nowait(PinnedBuffer(nbytes))

    def get_buffer(self, timeout: Optional[float] = None) -> PinnedBuffer:
        return self._q.get(timeout=timeout)

    def put_buffer(self, buf: PinnedBuffer) -> None:
        buf.rows = 0
        self._q.put_nowait(buf)

    def spare(self) -> int:
        return self._q.qsize()


class Batch:
    """A collated batch; recycle() when the copy to the device is done."""

    def __init__(self, buf: PinnedBuffer, labels: List[int], pool: PinnedPool) -> None:
        self.labels = labels
        self._buf: Optional[PinnedBuffer] = buf
        self._pool = pool

    def to_device(self) -> bytes:
        assert self._buf is not None
        return bytes(self._buf.host[: self._buf.rows])

    def recycle(self) -> None:
        if self._buf is None:
            return
        self._pool.put_buffer(self._buf)
        self._buf = None

    def __enter__(self) -> "Batch":
        return self

    def __exit__(self, *exc: object) -> None:
        self.recycle()


def collate(samples: Sequence[Sample], pool: PinnedPool) -> Batch:
    buf = pool.get_buffer()  # clean: near miss, moved into the batch, whose recycle() puts it back
    buf.collate(samples)
    return Batch(buf, [label for _, label in samples], pool)


def batches(source: Iterable[Sample], size: int, pool: PinnedPool) -> Iterator[Batch]:
    """Yields batches that belong to the consumer."""
    group: List[Sample] = []
    for sample in source:
        group.append(sample)
        if len(group) == size:
            yield collate(group, pool)  # clean: yielded to the consumer
            group = []
    if group:
        yield collate(group, pool)  # clean: yielded to the consumer


def scratch_batches(source: Iterable[Sequence[Sample]], pool: PinnedPool) -> Iterator[bytes]:
    """Collates all groups in one buffer and yields device copies."""
    buf = pool.get_buffer()  # leak: put back after the loop only, a consumer that stops early closes the generator at the yield
    for group in source:
        buf.collate(group)
        yield bytes(buf.host[: buf.rows])
    pool.put_buffer(buf)


def scratch_batches_closing(source: Iterable[Sequence[Sample]], pool: PinnedPool) -> Iterator[bytes]:
    buf = pool.get_buffer()  # clean: near miss, the finally runs when the generator is closed at the yield
    try:
        for group in source:
            buf.collate(group)
            yield bytes(buf.host[: buf.rows])
    finally:
        pool.put_buffer(buf)


def preview(source: Iterable[Sequence[Sample]], pool: PinnedPool, count: int) -> List[bytes]:
    out: List[bytes] = []
    for data in scratch_batches(source, pool):
        out.append(data)
        if len(out) == count:
            break
    return out


def train_epoch(source: Iterable[Sample], pool: PinnedPool, step: Callable[[bytes, List[int]], float]) -> float:
    total = 0.0
    for batch in batches(source, 4, pool):  # clean: the with statement recycles each batch
        with batch:
            total += step(batch.to_device(), batch.labels)
    return total


def eval_epoch(source: Iterable[Sample], pool: PinnedPool, ignore_label: int) -> int:
    hits = 0
    for batch in batches(source, 4, pool):  # leak: batches of ignored labels only are skipped before recycle()
        if all(label == ignore_label for label in batch.labels):
            continue
        hits += sum(a == b % 256 for a, b in zip(batch.to_device(), batch.labels))
        batch.recycle()
    return hits


class PrefetchLoader:
    """A thread fills a short queue with batches."""

    def __init__(self, groups: Sequence[Sequence[Sample]], pool: PinnedPool, depth: int = 2) -> None:
        self._groups = groups
        self._pool = pool
        self._ready: "queue.Queue[Optional[Batch]]" = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, daemon=True)

    def start(self) -> "PrefetchLoader":
        self._thread.start()
        return self

    def _fill(self) -> None:
        for group in self._groups:
            if self._stop.is_set():
                break
            batch = collate(group, self._pool)  # clean: near miss, queued, or recycled when the loader stops meanwhile
            while not self._stop.is_set():
                try:
                    self._ready.put(batch, timeout=0.05)
                    break
                except queue.Full:
                    continue
            else:
                batch.recycle()
        while not self._stop.is_set():
            try:
                self._ready.put(None, timeout=0.05)
                break
            except queue.Full:
                pass

    def __iter__(self) -> Iterator[Batch]:
        while True:
            batch = self._ready.get()
            if batch is None:
                return
            yield batch

    def shutdown(self) -> None:
        self._stop.set()
        self._thread.join()
        while not self._ready.empty():
            batch = self._ready.get_nowait()
            if batch is not None:
                batch.recycle()


class ReplayLoader:
    """Keeps a window of batches so that a spike in the loss can be replayed."""

    def __init__(self, pool: PinnedPool, window: int) -> None:
        self._pool = pool
        self._window = window
        self._recent: List[Batch] = []

    def push(self, samples: Sequence[Sample]) -> bytes:
        batch = collate(samples, self._pool)  # leak: slicing the window drops the oldest batch without recycle()
        self._recent.append(batch)
        self._recent = self._recent[-self._window:]
        return batch.to_device()

    def clear(self) -> None:
        for batch in self._recent:
            batch.recycle()
        self._recent.clear()
