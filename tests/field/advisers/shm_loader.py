"""Batch loader whose workers hand tensors over in a ring of shared-memory slots."""
from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator, Sequence

import numpy as np


@dataclass
class ShmSlot:
    idx: int
    array: np.ndarray
    length: int = 0


class SlotRing:
    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._free: deque[ShmSlot] = deque(ShmSlot(i, np.empty(slot_bytes, np.uint8)) for i in range(num_slots))
        self._ready: deque[ShmSlot] = deque()
        self._mutex = threading.Lock()

    def claim(self) -> ShmSlot | None:
        with self._mutex:
            return self._free.popleft() if self._free else None

    def claim_sized(self, nbytes: int) -> ShmSlot | None:
        with self._mutex:
            if not self._free:
                return None
            slot = self._free.popleft()  # leak: for too large a request the body returns None and the slot is in no list
            if nbytes > slot.array.nbytes:
                return None
            slot.length = nbytes
            return slot

    def claim_newest(self, nbytes: int) -> ShmSlot | None:
        with self._mutex:
            if not self._free:
                return None
            slot = self._free.pop()  # clean: near miss, appended again before the None is returned
            if nbytes > slot.array.nbytes:
                self._free.append(slot)
                return None
            slot.length = nbytes
            return slot

    def publish(self, slot: ShmSlot) -> None:
        with self._mutex:
            self._ready.append(slot)

    def take_ready(self) -> ShmSlot | None:
        with self._mutex:
            return self._ready.popleft() if self._ready else None

    def recycle(self, slot: ShmSlot) -> None:
        slot.length = 0
        with self._mutex:
            self._free.append(slot)


class SampleWorker:
    def __init__(self, ring: SlotRing, decode: Callable[[bytes], np.ndarray | None]) -> None:
        self.ring = ring
        self.decode = decode
        self.skipped = 0

    def push(self, record: bytes) -> bool:
        slot = self.ring.claim()  # leak: a record that does not decode counts as skipped and the slot is lost
        if slot is None:
            return False
        sample = self.decode(record)
        if sample is None:
            self.skipped += 1
            return True
        flat = sample.view(np.uint8).ravel()
        slot.array[: flat.size] = flat
        slot.length = flat.size
        self.ring.publish(slot)
        return True

    def push_many(self, records: Sequence[bytes]) -> int:
        pushed = 0
        slot = None
        for record in records:
            sample = self.decode(record)
            if sample is None:
                continue
            if slot is None:
                slot = self.ring.claim()  # clean: near miss, reused for the next record if too small, recycled at the end
                if slot is None:
                    break
            flat = sample.view(np.uint8).ravel()
            if flat.size > slot.array.size:
                self.skipped += 1
                continue
            slot.array[: flat.size] = flat
            slot.length = flat.size
            self.ring.publish(slot)
            slot = None
            pushed += 1
        if slot is not None:
            self.ring.recycle(slot)
        return pushed

    def push_raw(self, payload: bytes) -> bool:
        slot = self.ring.claim_newest(len(payload))  # clean: published for the reader
        if slot is None:
            return False
        slot.array[: len(payload)] = np.frombuffer(payload, np.uint8)
        self.ring.publish(slot)
        return True


class BatchReader:
    def __init__(self, ring: SlotRing, batch_size: int) -> None:
        self.ring = ring
        self.batch_size = batch_size
        self.partial: list[ShmSlot] = []
        self.peeked: ShmSlot | None = None

    def next_batch(self) -> list[np.ndarray] | None:
        while len(self.partial) < self.batch_size:
            slot = self.ring.take_ready()  # clean: near miss, the early return keeps it in partial for the next call
            if slot is None:
                return None
            self.partial.append(slot)
        out = [s.array[: s.length].copy() for s in self.partial]
        for slot in self.partial:
            self.ring.recycle(slot)
        self.partial = []
        return out

    def read_exact(self, n: int) -> list[np.ndarray]:
        held: list[ShmSlot] = []
        while len(held) < n:
            slot = self.ring.take_ready()  # leak: with too few ready ones the return hands out an empty list and drops held
            if slot is None:
                return []
            held.append(slot)
        out = [s.array[: s.length].copy() for s in held]
        for slot in held:
            self.ring.recycle(slot)
        return out

    def peek_length(self) -> int:
        if self.peeked is None:
            self.peeked = self.ring.take_ready()  # clean: near miss, kept until pop_peeked recycles it
        return self.peeked.length if self.peeked is not None else 0

    def pop_peeked(self) -> np.ndarray | None:
        slot, self.peeked = self.peeked, None
        if slot is None:
            return None
        data = slot.array[: slot.length].copy()
        self.ring.recycle(slot)
        return data

    def drain_nonempty(self) -> Iterator[np.ndarray]:
        while True:
            slot = self.ring.take_ready()  # leak: an empty slot is passed over by the continue, before the recycle
            if slot is None:
                return
            if slot.length == 0:
                continue
            data = slot.array[: slot.length].copy()
            self.ring.recycle(slot)
            yield data

    def discard(self, predicate: Callable[[np.ndarray], bool]) -> int:
        dropped, keep = 0, []
        while (slot := self.ring.take_ready()) is not None:  # clean: near miss, either recycled or published again below
            if predicate(slot.array[: slot.length]):
                self.ring.recycle(slot)
                dropped += 1
            else:
                keep.append(slot)
        for slot in keep:
            self.ring.publish(slot)
        return dropped

    def reset(self) -> None:
        for slot in self.partial:
            self.ring.recycle(slot)
        self.partial.clear()
        if self.peeked is not None:
            self.ring.recycle(self.peeked)
            self.peeked = None


def run_epoch(ring: SlotRing, worker: SampleWorker, reader: BatchReader, records: Iterable[bytes]) -> list[Any]:
    batches: list[Any] = []
    for record in records:
        while not worker.push(record):
            batch = reader.next_batch()
            if batch is not None:
                batches.append(batch)
    reader.reset()
    for payload in (b"eof", b"stats"):
        slot = ring.claim_sized(len(payload))  # clean: published as a trailer
        if slot is not None:
            slot.array[: len(payload)] = np.frombuffer(payload, np.uint8)
            ring.publish(slot)
    return batches
