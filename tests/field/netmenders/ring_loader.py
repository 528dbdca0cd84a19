"""Prefetching loader over a ring of preallocated batch slots."""
from __future__ import annotations

import logging
import queue
import threading
from typing import Any, Callable, Iterable, Iterator, List, Optional

import torch

log = logging.getLogger("loader")


class CorruptRecord(ValueError):
    pass


class BatchSlot:
    def __init__(self, index: int, batch: int, dim: int):
        self.index = index
        self.x = torch.empty(batch, dim)
        self.y = torch.empty(batch, dtype=torch.long)
        self.length = 0

    def load(self, record: Any) -> None:
        xs, ys = record
        if len(xs) > self.x.shape[0]:
            raise CorruptRecord(f"{len(xs)} rows")
        self.x[: len(xs)] = torch.as_tensor(xs)
        self.y[: len(ys)] = torch.as_tensor(ys)
        self.length = len(xs)


class SlotRing:
    """Blocking ring. reserve() waits for a slot, hand_back() returns one."""

    def __init__(self, slots: int, batch: int, dim: int):
        self._q: "queue.Queue[BatchSlot]" = queue.Queue()
        for i in range(slots):
            self._q.put(BatchSlot(i, batch, dim))

    def reserve(self) -> BatchSlot:
        return self._q.get()

    def reserve_or_none(self) -> Optional[BatchSlot]:
        try:
            return self._q.get_nowait()
        except queue.Empty:
            return None

    def hand_back(self, slot: BatchSlot) -> None:
        slot.length = 0
        self._q.put(slot)


class MeteredRing:
    """Wraps a ring and counts; refuses once a cap on the slots of one reader is reached."""

    def __init__(self, ring: SlotRing, cap: int):
        self.ring, self.cap, self.mine = ring, cap, 0

    def reserve_or_none(self) -> Optional[BatchSlot]:
        slot = self.ring.reserve_or_none()  # leak: at the cap the slot of the inner ring is not handed back
        if slot is None or self.mine >= self.cap:
            return None
        self.mine += 1
        return slot

    def hand_back(self, slot: BatchSlot) -> None:
        self.mine -= 1
        self.ring.hand_back(slot)


def slots_of(ring: SlotRing, records: Iterable[Any]) -> Iterator[BatchSlot]:
    """Lends each slot until the next one is asked for."""
    for rec in records:
        slot = ring.reserve()  # leak: a consumer that breaks off never resumes to the hand_back
        slot.load(rec)
        yield slot
        ring.hand_back(slot)


def slots_of_closing(ring: SlotRing, records: Iterable[Any]) -> Iterator[BatchSlot]:
    for rec in records:
        slot = ring.reserve()  # clean: near miss, finally runs on close() of the generator as well
        try:
            slot.load(rec)
            yield slot
        finally:
            ring.hand_back(slot)


def first_mean(ring: SlotRing, records: Iterable[Any], min_rows: int) -> Optional[float]:
    for slot in slots_of(ring, records):
        if slot.length >= min_rows:
            return float(slot.x[: slot.length].mean())
    return None


class Prefetcher:
    """A thread fills slots ahead of the training loop."""

    def __init__(self, ring: SlotRing, records: Iterable[Any], depth: int):
        self.ring = ring
        self.records = iter(records)
        self.ready: "queue.Queue[Optional[BatchSlot]]" = queue.Queue(depth)
        self.stop = threading.Event()
        self.bad = 0
        self.current: Optional[BatchSlot] = None

    def fill_loop(self) -> None:
        for rec in self.records:
            slot = self.ring.reserve()  # leak: a corrupt record is counted and its slot forgotten
            try:
                slot.load(rec)
            except CorruptRecord as e:
                self.bad += 1
                log.warning("record passed over: %s", e)
                continue
            self.ready.put(slot)
        self.ready.put(None)

    def fill_loop_strict(self) -> None:
        for rec in self.records:
            slot = self.ring.reserve()  # clean: handed back on a corrupt record or on stop, else queued in ready
            try:
                slot.load(rec)
            except CorruptRecord:
                self.ring.hand_back(slot)
                self.bad += 1
                continue
            if self.stop.is_set():
                self.ring.hand_back(slot)
                break
            self.ready.put(slot)
        self.ready.put(None)

    def advance(self) -> Optional[BatchSlot]:
        """The slot answered stays valid until the next advance()."""
        if self.current is not None:
            self.ring.hand_back(self.current)
            self.current = None
        self.current = self.ready.get()  # clean: near miss, the slot before was handed back, drain() returns the last
        if self.current is None:
            self.ready.put(None)
        return self.current

    def drain(self) -> None:
        self.stop.set()
        if self.current is not None:
            self.ring.hand_back(self.current)
            self.current = None
        while True:
            slot = self.ready.get()  # clean: handed back, None ends the loop
            if slot is None:
                return
            self.ring.hand_back(slot)

    def skip(self, n: int) -> int:
        skipped = 0
        while skipped < n:
            slot = self.ready.get()  # leak: skipped batches are taken off the queue and not handed back
            if slot is None:
                self.ready.put(None)
                break
            skipped += 1
        return skipped


class Mixer:
    """Interleaves sources; holds one filled slot for each in a table."""

    def __init__(self, ring: SlotRing, sources: List[Iterator[Any]]):
        self.ring = ring
        self.sources = sources
        self.heads: dict[int, BatchSlot] = {}

    def refill(self) -> None:
        for i, src in enumerate(self.sources):
            if i in self.heads:
                continue
            rec = next(src, None)
            if rec is None:
                continue
            slot = self.ring.reserve_or_none()  # clean: kept in heads, pick() or clear() takes it out
            if slot is None:
                return
            self.heads[i] = slot
            slot.load(rec)

    def pick(self, i: int, use: Callable[[BatchSlot], None]) -> bool:
        slot = self.heads.pop(i, None)  # clean: handed back in finally
        if slot is None:
            return False
        try:
            use(slot)
        finally:
            self.ring.hand_back(slot)
        return True

    def retire_source(self, i: int) -> int:
        slot = self.heads.pop(i, None)  # leak: the slot popped for a finished source is only measured
        self.sources[i] = iter(())
        return 0 if slot is None else slot.length

    def clear(self) -> None:
        while self.heads:
            _, slot = self.heads.popitem()
            self.ring.hand_back(slot)
