from __future__ import annotations

import contextlib
import queue
import threading
import zlib
from dataclasses import dataclass
from typing import Callable, Iterator, Optional, Sequence

import numpy as np
import torch


@dataclass(eq=False)
class ShmSlot:
    index: int
    array: np.ndarray
    length: int = 0


class ShmRing:
    def __init__(self, slots: int, nbytes: int) -> None:
        self._free: queue.SimpleQueue[ShmSlot] = queue.SimpleQueue()
        for i in range(slots):
            self._free.put(ShmSlot(i, np.zeros(nbytes, dtype=np.uint8)))

    def acquire_slot(self, timeout: Optional[float] = None) -> Optional[ShmSlot]:
        try:
            return self._free.get(timeout=timeout)
        except queue.Empty:
            return None

    def release_slot(self, slot: ShmSlot) -> None:
        slot.length = 0
        self._free.put(slot)

    @contextlib.contextmanager
    def slot(self, timeout: float) -> Iterator[Optional[ShmSlot]]:
        slot = self.acquire_slot(timeout)  # clean: released when the with block of the user ends
        try:
            yield slot
        finally:
            if slot is not None:
                self.release_slot(slot)

    @contextlib.contextmanager
    def nonempty(self, data: bytes, timeout: float) -> Iterator[Optional[ShmSlot]]:
        slot = self.acquire_slot(timeout)  # leak: empty data yields None and returns with the slot taken
        if slot is None or not data:
            yield None
            return
        try:
            slot.array[:len(data)] = np.frombuffer(data, dtype=np.uint8)
            slot.length = len(data)
            yield slot
        finally:
            self.release_slot(slot)


@dataclass
class Batch:
    index: int
    slot: ShmSlot

    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(self.slot.array[:self.slot.length])


def fill(slot: ShmSlot, sample: bytes) -> bool:
    if len(sample) > slot.array.nbytes:
        return False
    slot.array[:len(sample)] = np.frombuffer(sample, dtype=np.uint8)
    slot.length = len(sample)
    return True


class PrefetchLoader:
    def __init__(self, samples: Sequence[bytes], ring: ShmRing, depth: int = 4, strict: bool = True) -> None:
        self.samples = samples
        self.ring = ring
        self.strict = strict
        self._stop = threading.Event()
        self._ready: queue.Queue[Optional[Batch]] = queue.Queue(maxsize=depth)

    def _produce(self) -> None:
        for i, sample in enumerate(self.samples):
            slot = self.ring.acquire_slot()  # leak: an oversized sample is skipped together with its slot
            if slot is None or self._stop.is_set():
                if slot is not None:
                    self.ring.release_slot(slot)
                break
            if not fill(slot, sample):
                continue
            self._ready.put(Batch(i, slot))
        self._ready.put(None)

    def _produce_strict(self) -> None:
        for i, sample in enumerate(self.samples):
            if self._stop.is_set():
                break
            slot = self.ring.acquire_slot()  # clean: near miss, oversized samples give it back first, the others travel through the ready queue
            if slot is None:
                break
            if not fill(slot, sample):
                self.ring.release_slot(slot)
                continue
            self._ready.put(Batch(i, slot))
        self._ready.put(None)

    def __iter__(self) -> Iterator[torch.Tensor]:
        target = self._produce_strict if self.strict else self._produce
        self._stop.clear()
        worker = threading.Thread(target=target, daemon=True)
        worker.start()
        done = False
        try:
            while (batch := self._ready.get()) is not None:
                out = batch.tensor().clone()
                self.ring.release_slot(batch.slot)
                yield out
            done = True
        finally:
            self._stop.set()
            if not done:
                self._drain()
            worker.join()

    def _drain(self) -> None:
        while (batch := self._ready.get()) is not None:
            self.ring.release_slot(batch.slot)


class Shuffler:
    def __init__(self, ring: ShmRing, window: int) -> None:
        self.ring = ring
        self.window = window
        self._held: list[ShmSlot] = []
        self._last: Optional[ShmSlot] = None

    def push(self, sample: bytes) -> bool:
        slot = self.ring.acquire_slot(timeout=1.0)  # clean: near miss, joins the window or is released where it does not fit
        if slot is None:
            return False
        if not fill(slot, sample):
            self.ring.release_slot(slot)
            return False
        self._held.append(slot)
        return True

    def pop(self, rng: np.random.Generator) -> Optional[bytes]:
        if len(self._held) < self.window:
            return None
        slot = self._held.pop(int(rng.integers(len(self._held))))
        data = slot.array[:slot.length].tobytes()
        self.ring.release_slot(slot)
        return data

    def remember(self, sample: bytes) -> None:
        slot = self.ring.acquire_slot(timeout=1.0)  # leak: the slot of the previous sample is overwritten in _last
        if slot is not None and fill(slot, sample):
            self._last = slot
        elif slot is not None:
            self.ring.release_slot(slot)

    def flush(self) -> None:
        for slot in self._held:
            self.ring.release_slot(slot)
        self._held.clear()
        if self._last is not None:
            self.ring.release_slot(self._last)
            self._last = None


def digest(samples: Sequence[bytes], ring: ShmRing, fn: Callable[[np.ndarray], int]) -> list[int]:
    out: list[int] = []
    for sample in samples:
        with ring.slot(timeout=1.0) as slot:  # clean: near miss, continue leaves the with block by its exit
            if slot is None or not fill(slot, sample):
                out.append(-1)
                continue
            out.append(fn(slot.array[:slot.length]))
    return out


def crc(sample: bytes, ring: ShmRing) -> int:
    with ring.nonempty(sample, timeout=1.0) as slot:  # clean: near miss, a slot that was yielded goes back on the return
        return 0 if slot is None else zlib.crc32(slot.array[:slot.length])


def stream_slots(samples: Sequence[bytes], ring: ShmRing) -> Iterator[ShmSlot]:
    for sample in samples:
        slot = ring.acquire_slot(timeout=0.5)  # clean: near miss, the generator yields it and the consumer releases it
        if slot is None:
            return
        if fill(slot, sample):
            yield slot
        else:
            ring.release_slot(slot)


def total_bytes(samples: Sequence[bytes], ring: ShmRing) -> int:
    n = 0
    for slot in stream_slots(samples, ring):  # clean: released at the end of each turn
        n += slot.length
        ring.release_slot(slot)
    return n


def first_matching(samples: Sequence[bytes], ring: ShmRing, magic: bytes) -> int:
    for i, slot in enumerate(stream_slots(samples, ring)):  # leak: the return on a match comes before the release of the slot
        if slot.array[:len(magic)].tobytes() == magic:
            return i
        ring.release_slot(slot)
    return -1
