"""Shared-memory ring between the feature workers and the trainer."""
from __future__ import annotations

import threading
from collections import deque
from typing import Deque, Dict, Iterable, Iterator, List, Optional, Tuple

Sample = Tuple[int, ...]


class Slot:
    __slots__ = ("index", "rows", "fill")

    def __init__(self, index: int) -> None:
        self.index = index
        self.rows: List[Sample] = []
        self.fill = 0


class BatchRing:
    """reserve() -> commit() -> next_batch() -> recycle(); unreserve() undoes a reservation."""

    def __init__(self, depth: int) -> None:
        self._cond = threading.Condition()
        self._vacant: Deque[Slot] = deque(Slot(i) for i in range(depth))
        self._ready: Deque[Slot] = deque()
        self._closed = False

    def reserve(self) -> Optional[Slot]:
        with self._cond:
            while not self._vacant:
                if self._closed or not self._cond.wait(0.01):
                    return None
            slot = self._vacant.popleft()
            slot.rows = []
            return slot

    def unreserve(self, slot: Slot) -> None:
        with self._cond:
            self._vacant.appendleft(slot)
            self._cond.notify()

    def commit(self, slot: Slot) -> None:
        with self._cond:
            slot.fill = len(slot.rows)
            self._ready.append(slot)
            self._cond.notify()

    def next_batch(self) -> Optional[Slot]:
        with self._cond:
            return self._ready.popleft() if self._ready else None

    def recycle(self, slot: Slot) -> None:
        with self._cond:
            self._vacant.append(slot)
            self._cond.notify()

    def vacant(self) -> int:
        return len(self._vacant)


class Producer:
    def __init__(self, ring: BatchRing, batch_size: int) -> None:
        self.ring = ring
        self.batch_size = batch_size
        self._open: Optional[Slot] = None
        self._by_bucket: Dict[int, Slot] = {}

    def feed(self, samples: Iterable[Sample]) -> int:
        """Fills batches; the rest stays open until finish()."""
        committed = 0
        for sample in samples:
            if self._open is None:
                self._open = self.ring.reserve()  # clean: near miss, only when no slot is open; committed or unreserved in finish()
                if self._open is None:
                    break
            self._open.rows.append(sample)
            if len(self._open.rows) == self.batch_size:
                self.ring.commit(self._open)
                self._open = None
                committed += 1
        return committed

    def finish(self, drop_last: bool) -> None:
        if self._open is None:
            return
        if drop_last:
            self.ring.unreserve(self._open)
        else:
            self.ring.commit(self._open)
        self._open = None

    def feed_once(self, samples: List[Sample], drop_last: bool) -> bool:
        slot = self.ring.reserve()  # leak: a short batch under drop_last returns without unreserve
        if slot is None:
            return False
        slot.rows.extend(samples[:self.batch_size])
        if len(slot.rows) < self.batch_size and drop_last:
            return False
        self.ring.commit(slot)
        return True

    def feed_bucketed(self, samples: Iterable[Sample]) -> int:
        """One open slot per length bucket, all committed at the end."""
        count = 0
        for sample in samples:
            bucket = len(sample) // 8
            slot = self._by_bucket.get(bucket)
            if slot is None:
                slot = self.ring.reserve()  # clean: near miss, kept per bucket and committed when full or at the end
                if slot is None:
                    break
                self._by_bucket[bucket] = slot
            slot.rows.append(sample)
            if len(slot.rows) == self.batch_size:
                self.ring.commit(self._by_bucket.pop(bucket))
                count += 1
        for slot in self._by_bucket.values():
            self.ring.commit(slot)
            count += 1
        self._by_bucket.clear()
        return count

    def feed_filtered(self, groups: Iterable[List[Sample]]) -> int:
        fed = 0
        for group in groups:
            slot = self.ring.reserve()  # clean: near miss, unreserved before continue
            if slot is None:
                return fed
            slot.rows = [s for s in group if s]
            if not slot.rows:
                self.ring.unreserve(slot)
                continue
            self.ring.commit(slot)
            fed += 1
        return fed


class Consumer:
    def __init__(self, ring: BatchRing) -> None:
        self.ring = ring
        self._history: List[Slot] = []

    def batches(self) -> Iterator[List[Sample]]:
        while True:
            slot = self.ring.next_batch()  # leak: a consumer that breaks closes the generator at the yield
            if slot is None:
                return
            yield slot.rows
            self.ring.recycle(slot)

    def batches_guarded(self) -> Iterator[List[Sample]]:
        while True:
            slot = self.ring.next_batch()  # clean: near miss, finally recycles when the generator is closed too
            if slot is None:
                return
            try:
                yield slot.rows
            finally:
                self.ring.recycle(slot)

    def raw_slots(self) -> Iterator[Slot]:
        """Yields slots; whoever takes one recycles it."""
        slot = self.ring.next_batch()  # clean: yielded to the consumer who recycles
        while slot is not None:
            yield slot
            slot = self.ring.next_batch()  # clean: near miss, the former was handed over before the rebinding

    def train(self, max_steps: int) -> int:
        steps = 0
        for rows in self.batches():
            if steps == max_steps:
                break
            steps += 1
        return steps

    def train_guarded(self, max_steps: int) -> int:
        steps = 0
        for rows in self.batches_guarded():
            if steps == max_steps:
                break
            steps += 1
        return steps

    def count_rows(self) -> int:
        total = 0
        for slot in self.raw_slots():
            total += slot.fill
            self.ring.recycle(slot)
        return total

    def keep_window(self, width: int) -> int:
        """Sliding window over the last batches, for the online metrics."""
        slot = self.ring.next_batch()  # clean: near miss, kept in the history and recycled when it leaves the window
        if slot is None:
            return len(self._history)
        self._history.append(slot)
        while len(self._history) > width:
            self.ring.recycle(self._history.pop(0))
        return len(self._history)

    def end_window(self) -> None:
        while self._history:
            self.ring.recycle(self._history.pop())

    def peek_fill(self) -> int:
        slot = self.ring.next_batch()  # leak: the batch is taken for its fill only
        if slot is None:
            return 0
        return slot.fill

    def skip_until(self, first_id: int) -> Optional[List[Sample]]:
        slot = self.ring.next_batch()  # clean: near miss, recycled in the loop before the rebinding or after the copy
        while slot is not None:
            if slot.rows and slot.rows[0][0] == first_id:
                rows = list(slot.rows)
                self.ring.recycle(slot)
                return rows
            self.ring.recycle(slot)
            slot = self.ring.next_batch()  # clean: recycled on the next turn
        return None
