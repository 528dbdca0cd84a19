"""Moves batches of a dataset through staging buffers to the trainer."""
from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import contextmanager
from typing import Callable, Deque, Iterable, Iterator, Optional

log = logging.getLogger("staging_loader")
Sample = bytes


class Buffer:
    def __init__(self, index: int, capacity: int) -> None:
        self.index = index
        self.data = bytearray(capacity)
        self.used = 0

    def load(self, samples: list[Sample]) -> bool:
        self.used = 0
        for sample in samples:
            if self.used + len(sample) > len(self.data):
                return False
            self.data[self.used:self.used + len(sample)] = sample
            self.used += len(sample)
        return True


_buffers: Deque[Buffer] = deque()
_ready = threading.Condition()


def configure(count: int, capacity: int) -> None:
    with _ready:
        _buffers.extend(Buffer(i, capacity) for i in range(count))
        _ready.notify_all()


def rent(timeout: Optional[float] = None) -> Optional[Buffer]:
    """A staging buffer, or None after the timeout."""
    with _ready:
        if not _ready.wait_for(lambda: bool(_buffers), timeout):
            return None
        return _buffers.popleft()


def unrent(buffer: Buffer) -> None:
    buffer.used = 0
    with _ready:
        _buffers.append(buffer)
        _ready.notify()


@contextmanager
def staging() -> Iterator[Buffer]:
    buffer = rent()  # clean: unrented when the block ends
    try:
        yield buffer
    finally:
        unrent(buffer)


def rent_loaded(samples: list[Sample]) -> Optional[Buffer]:
    """A buffer that holds the samples; the caller unrents it."""
    buffer = rent(timeout=5.0)  # clean: unrented when the samples do not fit, else returned
    if buffer is None:
        return None
    if not buffer.load(samples):
        unrent(buffer)
        return None
    return buffer


def batches(source: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    for sample in source:
        batch.append(sample)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def stage_all(source: Iterable[Sample], size: int) -> Iterator[Buffer]:
    """The consumer unrents every buffer that it gets."""
    for batch in batches(source, size):
        buffer = rent_loaded(batch)  # clean: near miss, yielded to the consumer that owns it from then on
        if buffer is None:
            log.warning("a batch of %d samples does not fit", len(batch))
            continue
        yield buffer


def stage_views(source: Iterable[Sample], size: int) -> Iterator[memoryview]:
    """The consumer sees a view; the generator keeps the buffer."""
    for batch in batches(source, size):
        with staging() as buffer:  # clean: near miss, the block ends when the consumer asks for the next
            if not buffer.load(batch):
                continue
            yield memoryview(buffer.data)[:buffer.used]


def stage_reused(source: Iterable[Sample], size: int) -> Iterator[memoryview]:
    buffer = None
    try:
        for batch in batches(source, size):
            if buffer is None:
                buffer = rent()  # clean: near miss, rented once and unrented in the finally
            if buffer.load(batch):
                yield memoryview(buffer.data)[:buffer.used]
    finally:
        if buffer is not None:
            unrent(buffer)


def stage_bytes(source: Iterable[Sample], size: int) -> Iterator[bytes]:
    for batch in batches(source, size):
        buffer = rent()  # leak: a batch that does not fit leaves the loop with its buffer
        if not buffer.load(batch):
            break
        payload = bytes(buffer.data[:buffer.used])
        unrent(buffer)
        yield payload


class Trainer:
    def __init__(self, step: Callable[[memoryview], float]) -> None:
        self.step = step
        self.losses: list[float] = []
        self._ahead: Deque[Buffer] = deque()
        self._parked: dict[str, Buffer] = {}

    def epoch(self, source: Iterable[Sample], size: int) -> float:
        total = 0.0
        for buffer in stage_all(source, size):  # clean: each one is unrented after its step
            loss = self.step(memoryview(buffer.data)[:buffer.used])
            unrent(buffer)
            total += loss
        self.losses.append(total)
        return total

    def dry_run(self, source: Iterable[Sample], size: int) -> int:
        """Counts the bytes that an epoch would move."""
        return sum(buffer.used for buffer in stage_all(source, size))  # leak: no buffer of the run is unrented

    def until(self, source: Iterable[Sample], size: int, floor: float) -> Optional[float]:
        for buffer in stage_all(source, size):  # leak: the buffer of the last step is kept at the return
            loss = self.step(memoryview(buffer.data)[:buffer.used])
            if loss < floor:
                return loss
            unrent(buffer)
        return None

    def prefetch(self, batch: list[Sample], depth: int) -> bool:
        if len(self._ahead) >= depth:
            return False
        buffer = rent_loaded(batch)  # clean: near miss, unrented by consume() or drain()
        if buffer is None:
            return False
        self._ahead.append(buffer)
        return True

    def consume(self) -> Optional[float]:
        if not self._ahead:
            return None
        buffer = self._ahead.popleft()
        try:
            return self.step(memoryview(buffer.data)[:buffer.used])
        finally:
            unrent(buffer)

    def drain(self) -> None:
        while self._ahead:
            unrent(self._ahead.pop())

    def park(self, key: str, batch: list[Sample]) -> bool:
        """Keeps a batch for the evaluation at the end."""
        if key in self._parked:
            return False
        buffer = rent_loaded(batch)  # leak: evaluate() takes it out of the table without unrent
        if buffer is None:
            return False
        self._parked[key] = buffer
        return True

    def evaluate(self) -> dict[str, float]:
        scores: dict[str, float] = {}
        while self._parked:
            key, buffer = self._parked.popitem()
            scores[key] = self.step(memoryview(buffer.data)[:buffer.used])
        return scores

    def retry_step(self, batch: list[Sample], attempts: int) -> Optional[float]:
        buffer = None
        for _ in range(attempts):
            buffer = rent_loaded(batch)  # leak: the next attempt rents another one over it
            if buffer is None:
                continue
            loss = self.step(memoryview(buffer.data)[:buffer.used])
            if loss == loss:
                unrent(buffer)
                return loss
        return None
