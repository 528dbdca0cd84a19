"""Token loader with pinned staging: generators, a pin thread and sequence packing."""
from __future__ import annotations

import queue
import threading
from contextlib import contextmanager
from typing import Iterable, Iterator, List, Optional, Sequence

Batch = Sequence[int]


class StagingBuffer:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tokens: List[int] = []

    def fits(self, doc: Batch) -> bool:
        return len(self.tokens) + len(doc) <= self.capacity

    def fill(self, batch: Batch) -> None:
        self.tokens[:] = batch

    def append(self, doc: Batch) -> None:
        self.tokens.extend(doc)


class StagingPool:
    def __init__(self, count: int, capacity: int) -> None:
        self._idle: "queue.LifoQueue[StagingBuffer]" = queue.LifoQueue()
        for _ in range(count):
            self._idle.put(StagingBuffer(capacity))

    def borrow(self, timeout: Optional[float] = 5.0) -> StagingBuffer:
        return self._idle.get(timeout=timeout)

    def repay(self, buf: StagingBuffer) -> None:
        buf.tokens.clear()
        self._idle.put(buf)

    def idle(self) -> int:
        return self._idle.qsize()

    @contextmanager
    def loan(self, batch: Batch) -> Iterator[StagingBuffer]:
        buf = self.borrow()  # clean: repaid in finally
        try:
            buf.fill(batch)
            yield buf
        finally:
            self.repay(buf)


def staged(batches: Iterable[Batch], pool: StagingPool) -> Iterator[StagingBuffer]:
    """Filled buffers; the consumer repays each."""
    for batch in batches:
        if not batch:
            continue
        buf = pool.borrow()  # clean: yielded, the consumer repays it
        buf.fill(batch)
        yield buf


def staged_scoped(batches: Iterable[Batch], pool: StagingPool) -> Iterator[List[int]]:
    for batch in batches:
        buf = pool.borrow()  # clean: near miss, finally runs on resumption and when the generator is closed
        try:
            buf.fill(batch)
            yield buf.tokens
        finally:
            pool.repay(buf)


def staged_lagged(batches: Iterable[Batch], pool: StagingPool) -> Iterator[List[int]]:
    """A buffer may be refilled only after the copy of the following batch was issued."""
    prev: Optional[StagingBuffer] = None
    for batch in batches:
        buf = pool.borrow()  # leak: the last buffer stays in prev after the loop
        buf.fill(batch)
        if prev is not None:
            pool.repay(prev)
        prev = buf
        yield buf.tokens


def staged_lagged_closing(batches: Iterable[Batch], pool: StagingPool) -> Iterator[List[int]]:
    prev: Optional[StagingBuffer] = None
    try:
        for batch in batches:
            buf = pool.borrow()  # clean: near miss, repaid one round later or in finally
            if prev is not None:
                pool.repay(prev)
            prev = buf
            buf.fill(batch)
            yield buf.tokens
    finally:
        if prev is not None:
            pool.repay(prev)


def pack_documents(docs: Iterable[Batch], pool: StagingPool) -> Iterator[StagingBuffer]:
    cur = pool.borrow()  # leak: a partly filled last buffer is neither yielded nor repaid
    for doc in docs:
        if not cur.fits(doc):
            yield cur
            cur = pool.borrow()  # leak: a partly filled last buffer is neither yielded nor repaid
        cur.append(doc)


def pack_documents_flush(docs: Iterable[Batch], pool: StagingPool) -> Iterator[StagingBuffer]:
    cur = pool.borrow()  # clean: yielded when full, at the end yielded or repaid
    for doc in docs:
        if not cur.fits(doc):
            yield cur
            cur = pool.borrow()  # clean: near miss, the old one was handed out, this one is at the end
        cur.append(doc)
    if cur.tokens:
        yield cur
    else:
        pool.repay(cur)


def train_epoch(batches: Iterable[Batch], pool: StagingPool) -> int:
    seen = 0
    for buf in staged(batches, pool):  # clean: each buffer repaid in the loop
        seen += len(buf.tokens)
        pool.repay(buf)
    return seen


def evaluate(batches: Iterable[Batch], pool: StagingPool, max_len: int) -> float:
    total, n = 0, 0
    for buf in staged(batches, pool):  # leak: overlong batches continue without repaying
        if len(buf.tokens) > max_len:
            continue
        total += sum(buf.tokens)
        n += 1
        pool.repay(buf)
    return total / max(n, 1)


def profile_steps(batches: Iterable[Batch], pool: StagingPool, limit: int) -> int:
    tokens = 0
    for step, buf in enumerate(staged(batches, pool)):  # leak: the buffer of the step that breaks is not repaid
        if step >= limit:
            break
        tokens += len(buf.tokens)
        pool.repay(buf)
    return tokens


def peek(batches: Iterable[Batch], pool: StagingPool) -> List[int]:
    for tokens in staged_scoped(batches, pool):  # clean: near miss, leaving the loop closes the generator
        return list(tokens)
    return []


def packed_epoch(docs: Iterable[Batch], pool: StagingPool) -> int:
    n = 0
    for buf in pack_documents_flush(docs, pool):  # clean: repaid in finally, also for the skipped ones
        try:
            if len(buf.tokens) < 2:
                continue
            n += 1
        finally:
            pool.repay(buf)
    return n


def loss_of(batch: Batch, pool: StagingPool) -> float:
    with pool.loan(batch) as buf:  # clean: with block
        if not buf.tokens:
            return 0.0
        return sum(buf.tokens) / len(buf.tokens)


def batch_lengths(batches: Iterable[Batch], pool: StagingPool) -> List[int]:
    return [len(t) for t in staged_lagged_closing(batches, pool)]  # clean: the exhausted generator repays its buffers


class PinThread(threading.Thread):
    """Fills buffers in the background; None marks the end."""

    def __init__(self, source: Iterable[Batch], pool: StagingPool, depth: int = 2) -> None:
        super().__init__(daemon=True)
        self.source = source
        self.pool = pool
        self.out: "queue.Queue[Optional[StagingBuffer]]" = queue.Queue(depth)
        self.stop = threading.Event()

    def run(self) -> None:
        for batch in self.source:
            buf = self.pool.borrow()  # leak: a stop seen after borrowing breaks with the buffer in hand
            if self.stop.is_set():
                break
            buf.fill(batch)
            self.out.put(buf)
        self.out.put(None)


class DrainingPinThread(PinThread):
    def run(self) -> None:
        for batch in self.source:
            buf = self.pool.borrow()  # clean: near miss, queued, or repaid by the while's else on stop
            buf.fill(batch)
            while not self.stop.is_set():
                try:
                    self.out.put(buf, timeout=0.05)
                    break
                except queue.Full:
                    continue
            else:
                self.pool.repay(buf)
                return
        self.out.put(None)

    def shutdown(self) -> None:
        self.stop.set()
        self.join()
        while True:
            try:
                buf = self.out.get_nowait()
            except queue.Empty:
                return
            if buf is not None:
                self.pool.repay(buf)


if __name__ == "__main__":
    sp = StagingPool(6, 8)
    data = [[1, 2, 3], [4, 5], [6]]
    print(train_epoch(data, sp), evaluate(data, sp, 8), profile_steps(data, sp, 9), peek(data, sp), loss_of([1, 2], sp))
    print(packed_epoch(data * 4, sp), batch_lengths(data, sp), sp.idle())
    th = DrainingPinThread(data * 5, sp)
    th.start()
    first = th.out.get()
    sp.repay(first)
    th.shutdown()
    print(sp.idle())
