"""Shared-memory batch loader: worker processes fill ring slots which the trainer consumes."""
from __future__ import annotations

import queue
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Optional

import numpy as np
import torch


@dataclass
class Slot:
    index: int
    array: np.ndarray
    length: int = 0


class SlotRing:
    def __init__(self, n_slots: int, slot_elems: int) -> None:
        self.slots = [Slot(i, np.zeros(slot_elems, dtype=np.float32)) for i in range(n_slots)]
        self._free: deque[int] = deque(range(n_slots))
        self._cv = threading.Condition()

    def claim(self, timeout: Optional[float] = None) -> Optional[Slot]:
        with self._cv:
            if not self._cv.wait_for(lambda: bool(self._free), timeout):
                return None
            return self.slots[self._free.popleft()]

    def restore(self, slot: Slot) -> None:
        slot.length = 0
        with self._cv:
            self._free.append(slot.index)
            self._cv.notify()

    def claim_clean(self) -> Optional[Slot]:
        slot = self.claim(timeout=0)  # clean: near miss, zeroed and returned to the caller, None stays None
        if slot is not None:
            slot.array.fill(0)
        return slot

    def resize(self, keep: int) -> None:
        with self._cv:
            for _ in range(len(self._free)):
                index = self._free.popleft()  # clean: near miss, small indices are appended again and larger ones leave the ring on purpose
                if index < keep:
                    self._free.append(index)


@dataclass
class Batch:
    slot: Slot
    tensor: torch.Tensor
    epoch: int


class Prefetcher:
    def __init__(self, ring: SlotRing, source: Iterator[np.ndarray], depth: int = 4) -> None:
        self.ring = ring
        self.source = source
        self.ready: queue.Queue[Optional[Batch]] = queue.Queue(maxsize=depth)
        self.stop = threading.Event()
        self.epoch = 0
        self.peeked: Optional[Batch] = None
        self.carry: Optional[Slot] = None

    def run(self) -> None:
        for sample in self.source:
            slot = self.ring.claim()  # leak: samples that do not fit are skipped by continue with the slot claimed
            if slot is None:
                break
            if sample.size > slot.array.size:
                continue
            slot.array[: sample.size] = sample
            slot.length = sample.size
            self.ready.put(Batch(slot, torch.from_numpy(slot.array[: sample.size]), self.epoch))
        self.ready.put(None)

    def run_bounded(self, limit: int) -> int:
        filled = 0
        while filled < limit and not self.stop.is_set():
            slot = self.ring.claim(timeout=0.1)  # clean: near miss, the end of the source restores it before break
            if slot is None:
                continue
            sample = next(self.source, None)
            if sample is None:
                self.ring.restore(slot)
                break
            n = min(sample.size, slot.array.size)
            slot.array[:n] = sample[:n]
            slot.length = n
            self.ready.put(Batch(slot, torch.from_numpy(slot.array[:n]), self.epoch))
            filled += 1
        return filled

    def get(self) -> Optional[Batch]:
        if self.peeked is not None:
            batch, self.peeked = self.peeked, None
            return batch
        return self.ready.get()

    def peek(self) -> Optional[Batch]:
        if self.peeked is None:
            self.peeked = self.get()  # clean: near miss, only when nothing is peeked; get hands it out first and shutdown restores it
        return self.peeked

    def done_with(self, batch: Batch) -> None:
        self.ring.restore(batch.slot)

    def pack(self, samples: list[np.ndarray]) -> Optional[Batch]:
        slot = self.carry if self.carry is not None else self.ring.claim()  # clean: near miss, a carried slot is used first and the new one ends in a batch or in carry
        self.carry = None
        if slot is None:
            return None
        for sample in samples:
            if slot.length + sample.size > slot.array.size:
                break
            slot.array[slot.length : slot.length + sample.size] = sample
            slot.length += sample.size
        if slot.length * 2 < slot.array.size:
            self.carry = slot
            return None
        return Batch(slot, torch.from_numpy(slot.array[: slot.length]), self.epoch)

    def shutdown(self) -> None:
        self.stop.set()
        while not self.ready.empty():
            item = self.ready.get_nowait()
            if item is not None:
                self.ring.restore(item.slot)
        if self.peeked is not None:
            self.ring.restore(self.peeked.slot)
            self.peeked = None
        if self.carry is not None:
            self.ring.restore(self.carry)
            self.carry = None


class TrainFeed:
    def __init__(self, prefetcher: Prefetcher, device: torch.device) -> None:
        self.pf = prefetcher
        self.device = device
        self.held: list[Batch] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            batch = self.pf.get()  # clean: near miss, stale epochs and the yielded copy both restore the slot
            if batch is None:
                return
            if batch.epoch != self.pf.epoch:
                self.pf.done_with(batch)
                continue
            out = batch.tensor.to(self.device, copy=True)
            self.pf.done_with(batch)
            yield out

    def skip(self, n: int) -> int:
        skipped = 0
        while skipped < n:
            batch = self.pf.get()  # leak: skipped batches are counted but their slots are never restored
            if batch is None:
                break
            skipped += 1
        return skipped

    def next_group(self, k: int, collate: Callable[[list[torch.Tensor]], torch.Tensor]) -> Optional[torch.Tensor]:
        group: list[Batch] = []
        while len(group) < k:
            batch = self.pf.get()  # leak: the end of the stream returns None with the batches of a short group
            if batch is None:
                return None
            group.append(batch)
        out = collate([b.tensor.clone() for b in group])
        for b in group:
            self.pf.done_with(b)
        return out

    def hold(self) -> Optional[torch.Tensor]:
        batch = self.pf.get()  # clean: near miss, kept in held and let_go restores them after the step
        if batch is None:
            return None
        self.held.append(batch)
        return batch.tensor

    def let_go(self) -> None:
        for batch in self.held:
            self.pf.done_with(batch)
        self.held.clear()

    def pack_all(self, groups: list[list[np.ndarray]], sink: Callable[[torch.Tensor], Any]) -> int:
        sent = 0
        for samples in groups:
            batch = self.pf.pack(samples)  # clean: restored after the sink, nothing to restore when carried
            if batch is None:
                continue
            sink(batch.tensor.clone())
            self.pf.done_with(batch)
            sent += 1
        return sent

    def synthetic(self, n: int) -> Iterator[torch.Tensor]:
        for i in range(n):
            slot = self.pf.ring.claim_clean()  # leak: every odd index yields a zero tensor and goes on without restore
            if slot is None:
                return
            if i % 2:
                yield torch.zeros(slot.array.size)
                continue
            slot.array[:] = i
            yield torch.from_numpy(slot.array.copy())
            self.pf.ring.restore(slot)
