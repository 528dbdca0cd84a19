"""Shared-memory sample slots for a multi-worker data loader."""
from __future__ import annotations

import random
import threading
from contextlib import closing
from typing import Callable, Iterable, Iterator, Optional


class ShmSlot:
    __slots__ = ("idx", "mem", "size", "_owner")

    def __init__(self, idx: int, nbytes: int, owner: "SlotTable") -> None:
        self.idx = idx
        self.mem = bytearray(nbytes)
        self.size = 0
        self._owner = owner

    def store(self, sample: bytes) -> "ShmSlot":
        self.size = len(sample)
        self.mem[: self.size] = sample
        return self

    def load(self) -> bytes:
        return bytes(self.mem[: self.size])

    def done(self) -> None:
        """Hands the slot back to its table."""
        self._owner._restore(self)


class SlotTable:
    """Slots link into a free chain of indices, -1 ends it."""

    def __init__(self, n: int, nbytes: int) -> None:
        self._slots = [ShmSlot(i, nbytes, self) for i in range(n)]
        self._next = list(range(1, n)) + [-1]
        self._head = 0
        self._lock = threading.Lock()

    def grab(self) -> Optional[ShmSlot]:
        with self._lock:
            if self._head == -1:
                return None
            idx = self._head
            self._head = self._next[idx]
            return self._slots[idx]

    def _restore(self, slot: ShmSlot) -> None:
        with self._lock:
            self._next[slot.idx] = self._head
            self._head = slot.idx


Transform = Callable[[bytes], Optional[bytes]]


class Worker:
    def __init__(self, table: SlotTable, transform: Transform) -> None:
        self.table = table
        self.transform = transform
        self.outbox: list[ShmSlot] = []
        self.skipped = 0

    def produce(self, samples: Iterable[bytes]) -> int:
        count = 0
        for sample in samples:
            slot = self.table.grab()  # leak: a filtered sample continues with the slot in hand
            if slot is None:
                break
            out = self.transform(sample)
            if out is None:
                self.skipped += 1
                continue
            self.outbox.append(slot.store(out))
            count += 1
        return count

    def produce_filtered(self, samples: Iterable[bytes]) -> int:
        count = 0
        for sample in samples:
            out = self.transform(sample)
            if out is None:
                self.skipped += 1
                continue
            slot = self.table.grab()  # clean: near miss, the filter comes first, the outbox is drained by flush()
            if slot is None:
                break
            self.outbox.append(slot.store(out))
            count += 1
        return count

    def flush(self) -> list[bytes]:
        out: list[bytes] = []
        while self.outbox:
            slot = self.outbox.pop(0)
            out.append(slot.load())
            slot.done()
        return out

    def tolerant(self, samples: Iterable[bytes]) -> Iterator[bytes]:
        for sample in samples:
            slot = self.table.grab()  # leak: a transform that raises ValueError is survived without done()
            if slot is None:
                return
            try:
                out = self.transform(sample)
                slot.store(out or b"")
            except ValueError:
                self.skipped += 1
                continue
            data = slot.load()
            slot.done()
            yield data


class ShuffleBuffer:
    def __init__(self, table: SlotTable, capacity: int, seed: int) -> None:
        self.table = table
        self.capacity = capacity
        self.rng = random.Random(seed)
        self._held: list[ShmSlot] = []

    def offer(self, sample: bytes) -> Optional[bytes]:
        evicted: Optional[bytes] = None
        if len(self._held) >= self.capacity:
            victim = self._held.pop(self.rng.randrange(len(self._held)))
            evicted = victim.load()
            victim.done()
        slot = self.table.grab()  # clean: held until evicted or drained
        if slot is not None:
            self._held.append(slot.store(sample))
        return evicted

    def drain(self) -> Iterator[bytes]:
        self.rng.shuffle(self._held)
        while self._held:
            slot = self._held.pop()
            data = slot.load()
            slot.done()
            yield data


class Reservoir:
    def __init__(self, table: SlotTable, k: int, seed: int) -> None:
        self.table = table
        self.k = k
        self.seen = 0
        self.rng = random.Random(seed)
        self.kept: list[ShmSlot] = []

    def add(self, sample: bytes) -> None:
        self.seen += 1
        if len(self.kept) < self.k:
            slot = self.table.grab()  # leak: its place in kept is overwritten by a later sample
            if slot is not None:
                self.kept.append(slot.store(sample))
            return
        at = self.rng.randrange(self.seen)
        if at < self.k:
            slot = self.table.grab()  # leak: overwritten in kept by a still later sample
            if slot is not None:
                self.kept[at] = slot.store(sample)

    def close(self) -> None:
        for slot in self.kept:
            slot.done()
        self.kept = []


class Batcher:
    def __init__(self, table: SlotTable, batch_size: int, drop_last: bool) -> None:
        self.table = table
        self.batch_size = batch_size
        self.drop_last = drop_last

    def batches(self, samples: Iterable[bytes]) -> Iterator[list[bytes]]:
        batch: list[ShmSlot] = []
        for sample in samples:
            slot = self.table.grab()  # leak: with drop_last the last short batch is dropped unreturned
            if slot is None:
                raise RuntimeError("slot table exhausted")
            batch.append(slot.store(sample))
            if len(batch) == self.batch_size:
                yield self._emit(batch)
                batch = []
        if batch and not self.drop_last:
            yield self._emit(batch)

    def _emit(self, batch: list[ShmSlot]) -> list[bytes]:
        out = [s.load() for s in batch]
        for s in batch:
            s.done()
        return out

    def views(self, samples: Iterable[bytes]) -> Iterator[ShmSlot]:
        for sample in samples:
            slot = self.table.grab()  # leak: a consumer that stops at the yield leaves it taken
            if slot is None:
                return
            yield slot.store(sample)
            slot.done()

    def guarded_views(self, samples: Iterable[bytes]) -> Iterator[ShmSlot]:
        slot: Optional[ShmSlot] = None
        try:
            for sample in samples:
                slot = self.table.grab()  # clean: near miss, done() after each yield or in the finally
                if slot is None:
                    return
                yield slot.store(sample)
                slot.done()
                slot = None
        finally:
            if slot is not None:
                slot.done()


def find_first(batcher: Batcher, samples: Iterable[bytes], needle: bytes) -> int:
    for i, slot in enumerate(batcher.views(samples)):  # clean: the generator owns the slots
        if needle in slot.load():
            return i
    return -1


def find_first_closing(batcher: Batcher, samples: Iterable[bytes], needle: bytes) -> int:
    with closing(batcher.guarded_views(samples)) as views:  # clean: closed generator runs its finally
        for i, slot in enumerate(views):
            if needle in slot.load():
                return i
    return -1


def peek(table: SlotTable, sample: bytes) -> bytes:
    slot = table.grab()  # clean: given back right after the load
    if slot is None:
        return sample
    data = slot.store(sample).load()
    slot.done()
    return data
