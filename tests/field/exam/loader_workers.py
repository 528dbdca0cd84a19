"""Prefetching data loader with a fixed set of batch buffers."""
import collections
import logging
import random
import threading
from queue import Empty, Queue
from typing import Any, Callable, Deque, Iterator, List, Optional, Tuple

import torch

LOG = logging.getLogger("loader")

Sample = Tuple[torch.Tensor, int]


class BatchSlots:
    def __init__(self, n: int, batch: int, width: int):
        self._avail: "Queue[torch.Tensor]" = Queue()
        for _ in range(n):
            self._avail.put(torch.zeros(batch, width))

    def take(self, timeout: float = 1.0) -> Optional[torch.Tensor]:
        try:
            return self._avail.get(timeout=timeout)  # clean: goes to the caller
        except Empty:
            return None

    def return_(self, buf: torch.Tensor) -> None:
        self._avail.put(buf)


class Loader:
    def __init__(self, data: List[Sample], slots: BatchSlots, batch: int, collate: Optional[Callable[[List[Sample], torch.Tensor], Any]] = None):
        self.data = data
        self.slots = slots
        self.batch = batch
        self.collate = collate
        self.ready: "Queue[Optional[torch.Tensor]]" = Queue(maxsize=4)
        self.pending: Deque[torch.Tensor] = collections.deque()
        self._lock = threading.Lock()
        self._seen = 0

    def _fill(self, buf: torch.Tensor, rows: List[Sample]) -> bool:
        if any(r[0].numel() != buf.shape[1] for r in rows):
            return False
        for i, (x, _) in enumerate(rows):
            buf[i].copy_(x)
        return True

    def _chunks(self) -> Iterator[List[Sample]]:
        for i in range(0, len(self.data), self.batch):
            yield self.data[i:i + self.batch]

    # -- producer / consumer ------------------------------------------------
    def producer(self) -> None:
        for rows in self._chunks():
            buf = self.slots.take()  # leak: a malformed chunk is skipped with its buffer
            if buf is None:
                break
            if not self._fill(buf, rows):
                LOG.error("ragged rows")
                continue
            self.ready.put(buf)
        self.ready.put(None)

    def produce(self) -> None:
        for rows in self._chunks():
            buf = self.slots.take()  # clean: near miss, the bad chunk gives the buffer back, consumer returns the rest
            if buf is None:
                break
            if not self._fill(buf, rows):
                self.slots.return_(buf)
                continue
            self.ready.put(buf)
        self.ready.put(None)

    def consumer(self, fn: Callable[[torch.Tensor], None]) -> int:
        n = 0
        while True:
            buf = self.ready.get()
            if buf is None:
                return n
            fn(buf)
            self.slots.return_(buf)
            n += 1

    # -- generators ---------------------------------------------------------
    def iter_copies(self) -> Iterator[torch.Tensor]:
        for rows in self._chunks():
            buf = self.slots.take()  # clean: returned before the clone is yielded
            if buf is None:
                return
            ok = self._fill(buf, rows)
            out = buf.clone()
            self.slots.return_(buf)
            if ok:
                yield out

    def iter_lent(self) -> Iterator[torch.Tensor]:
        for rows in self._chunks():
            buf = self.slots.take()  # clean: near miss, finally runs also when the consumer stops early
            if buf is None:
                return
            try:
                if self._fill(buf, rows):
                    yield buf
            finally:
                self.slots.return_(buf)

    def iter_limited(self, limit: int) -> Iterator[float]:
        for k, rows in enumerate(self._chunks()):
            buf = self.slots.take()  # leak: break at the limit leaves the buffer out
            if buf is None:
                return
            self._fill(buf, rows)
            if k >= limit:
                break
            yield float(buf.mean())
            self.slots.return_(buf)

    # -- lookahead ----------------------------------------------------------
    def prefetch(self, n: int) -> int:
        for _ in range(n):
            buf = self.slots.take(0.1)  # clean: kept in pending, close returns all
            if buf is None:
                break
            self.pending.append(buf)
        return len(self.pending)

    def close(self) -> None:
        while self.pending:
            self.slots.return_(self.pending.popleft())

    def bump(self, by: int) -> int:
        self._lock.acquire()  # clean: released in finally
        try:
            self._seen += by
            return self._seen
        finally:
            self._lock.release()

    def bump_if(self, by: int) -> bool:
        if not self._lock.acquire(timeout=0.5):  # leak: non-positive step returns with the lock held
            return False
        if by <= 0:
            return False
        self._seen += by
        self._lock.release()
        return True

    def sample_stats(self, k: int) -> List[float]:
        stats = []
        for rows in random.sample(list(self._chunks()), k):
            buf = self.slots.take()  # leak: only the last buffer is returned, after the loop
            if buf is None:
                return stats
            self._fill(buf, rows)
            stats.append(float(buf.std()))
        if stats:
            self.slots.return_(buf)
        return stats
