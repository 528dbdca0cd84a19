"""Shared-memory ring between data loading workers and the trainer."""
from __future__ import annotations

import queue
import threading
from collections import deque
from dataclasses import dataclass
from multiprocessing import shared_memory
from typing import Callable, Iterator, Optional, Sequence

import numpy as np


class SlotRing:
    def __init__(self, name: str, slots: int, slot_bytes: int) -> None:
        self.shm = shared_memory.SharedMemory(name=name, create=True, size=slots * slot_bytes)  # clean: kept in the ring and closed by destroy
        self.slot_bytes = slot_bytes
        self._free: deque[int] = deque(range(slots))
        self._cv = threading.Condition()

    def claim(self, timeout: Optional[float] = None) -> Optional[int]:
        with self._cv:
            if not self._cv.wait_for(lambda: bool(self._free), timeout):
                return None
            return self._free.popleft()

    def claim_two(self) -> Optional[tuple[int, int]]:
        with self._cv:
            if not self._free:
                return None
            a = self._free.popleft()  # leak: with one slot left the popped one is not put back
            if not self._free:
                return None
            return a, self._free.popleft()

    def unclaim(self, slot: int) -> None:
        with self._cv:
            self._free.append(slot)
            self._cv.notify()

    def buf(self, slot: int) -> memoryview:
        lo = slot * self.slot_bytes
        return self.shm.buf[lo : lo + self.slot_bytes]

    def destroy(self) -> None:
        self.shm.close()
        self.shm.unlink()


@dataclass
class SampleRef:
    index: int
    slot: int
    shape: tuple[int, ...]
    dtype: str


class Worker:
    def __init__(self, ring: SlotRing, dataset: Sequence[np.ndarray], out: "queue.Queue[Optional[SampleRef]]") -> None:
        self.ring = ring
        self.dataset = dataset
        self.out = out
        self.skipped = 0

    def produce(self, index: int) -> bool:
        slot = self.ring.claim(timeout=10.0)  # clean: near miss, oversize samples unclaim it and others put it on the queue
        if slot is None:
            return False
        arr = self.dataset[index]
        if arr.nbytes > self.ring.slot_bytes:
            self.ring.unclaim(slot)
            self.skipped += 1
            return False
        dst = np.frombuffer(self.ring.buf(slot), dtype=arr.dtype, count=arr.size)
        dst[:] = arr.ravel()
        self.out.put(SampleRef(index, slot, arr.shape, str(arr.dtype)))
        return True

    def produce_decoded(self, index: int, decode: Callable[[np.ndarray], np.ndarray]) -> bool:
        slot = self.ring.claim()  # leak: an undecodable sample returns False from the handler with the slot claimed
        if slot is None:
            return False
        try:
            arr = decode(self.dataset[index])
        except ValueError:
            self.skipped += 1
            return False
        dst = np.frombuffer(self.ring.buf(slot), dtype=arr.dtype, count=arr.size)
        dst[:] = arr.ravel()
        self.out.put(SampleRef(index, slot, arr.shape, str(arr.dtype)))
        return True

    def produce_pair(self, i: int, j: int) -> bool:
        pair = self.ring.claim_two()  # clean: both slots travel in refs on the queue
        if pair is None:
            return False
        for index, slot in zip((i, j), pair):
            arr = self.dataset[index]
            np.frombuffer(self.ring.buf(slot), dtype=arr.dtype, count=arr.size)[:] = arr.ravel()
            self.out.put(SampleRef(index, slot, arr.shape, str(arr.dtype)))
        return True

    def produce_retry(self, index: int, attempts: int) -> bool:
        for _ in range(attempts):
            slot = self.ring.claim(timeout=0.5)  # leak: a full queue goes round for another attempt with a new slot
            if slot is None:
                continue
            arr = self.dataset[index]
            np.frombuffer(self.ring.buf(slot), dtype=arr.dtype, count=arr.size)[:] = arr.ravel()
            try:
                self.out.put(SampleRef(index, slot, arr.shape, str(arr.dtype)), timeout=0.5)
            except queue.Full:
                continue
            return True
        return False

    def produce_blocking(self, index: int, attempts: int) -> bool:
        slot = self.ring.claim()  # clean: near miss, one slot is used over the attempts and unclaimed when all fail
        if slot is None:
            return False
        arr = self.dataset[index]
        np.frombuffer(self.ring.buf(slot), dtype=arr.dtype, count=arr.size)[:] = arr.ravel()
        for _ in range(attempts):
            try:
                self.out.put(SampleRef(index, slot, arr.shape, str(arr.dtype)), timeout=0.5)
                return True
            except queue.Full:
                continue
        self.ring.unclaim(slot)
        return False


class Collator:
    def __init__(self, ring: SlotRing, refs: "queue.Queue[Optional[SampleRef]]", batch_size: int) -> None:
        self.ring = ring
        self.refs = refs
        self.batch_size = batch_size

    def array(self, ref: SampleRef) -> np.ndarray:
        n = int(np.prod(ref.shape))
        return np.frombuffer(self.ring.buf(ref.slot), dtype=ref.dtype, count=n).reshape(ref.shape)

    def take(self) -> Optional[SampleRef]:
        return self.refs.get()  # clean: the ref and its slot go to the caller

    def batches(self) -> Iterator[np.ndarray]:
        pending: list[np.ndarray] = []
        while True:
            ref = self.take()  # clean: near miss, the sample is copied out and its slot unclaimed before the yield
            if ref is None:
                break
            pending.append(self.array(ref).copy())
            self.ring.unclaim(ref.slot)
            if len(pending) == self.batch_size:
                yield np.stack(pending)
                pending = []
        if pending:
            yield np.stack(pending)

    def same_shape_batch(self, shape: tuple[int, ...]) -> list[np.ndarray]:
        out: list[np.ndarray] = []
        while len(out) < self.batch_size:
            ref = self.take()  # leak: a ref of another shape is passed over and its slot never unclaimed
            if ref is None:
                break
            if ref.shape != shape:
                continue
            out.append(self.array(ref).copy())
            self.ring.unclaim(ref.slot)
        return out

    def drain(self) -> int:
        n = 0
        while not self.refs.empty():
            ref = self.take()  # clean: unclaimed unless it is the end marker
            if ref is None:
                continue
            self.ring.unclaim(ref.slot)
            n += 1
        return n


def attach_bytes(name: str, offset: int, length: int) -> Optional[bytes]:
    shm = shared_memory.SharedMemory(name=name)  # leak: a range past the end returns with the mapping open
    if offset + length > shm.size:
        return None
    data = bytes(shm.buf[offset : offset + length])
    shm.close()
    return data


def segment_size(name: str) -> int:
    try:
        shm = shared_memory.SharedMemory(name=name)  # clean: near miss, closed on the only way on which it exists
    except FileNotFoundError:
        return 0
    size = shm.size
    shm.close()
    return size
