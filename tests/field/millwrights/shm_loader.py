"""Data loader whose workers fill slots of a shared memory ring; a collator consumes them."""
from __future__ import annotations

import logging
import queue
import threading
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Iterator, Optional

import torch

log = logging.getLogger("loader")


@dataclass(frozen=True)
class SlotRef:
    ring: "ShmRing"
    index: int
    length: int = 0

    def tensor(self) -> torch.Tensor:
        return self.ring.storage[self.index]

    def recycle(self) -> None:
        self.ring.put_slot(self)


class ShmRing:
    def __init__(self, slots: int, width: int) -> None:
        self.storage = torch.empty(slots, width).share_memory_()
        self._free: "queue.Queue[int]" = queue.Queue()
        for i in range(slots):
            self._free.put(i)

    def get_slot(self, timeout: float = 5.0) -> Optional[SlotRef]:
        try:
            return SlotRef(self, self._free.get(timeout=timeout))
        except queue.Empty:
            return None

    def put_slot(self, ref: SlotRef) -> None:
        self._free.put(ref.index)

    @contextmanager
    def slot(self) -> Iterator[SlotRef]:
        ref = self.get_slot(timeout=30.0)  # clean: put back in finally, None raises without a slot
        if ref is None:
            raise TimeoutError("ring is full")
        try:
            yield ref
        finally:
            self.put_slot(ref)


class Batch:
    """Rows of a ring, alive until release is called."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.refs: list[SlotRef] = []

    def add(self, ref: SlotRef) -> None:
        self.refs.append(ref)

    def stack(self) -> torch.Tensor:
        return torch.stack([r.tensor() for r in self.refs])

    def release(self) -> None:
        for ref in self.refs:
            ref.recycle()
        self.refs = []

    def __len__(self) -> int:
        return len(self.refs)


class Worker(threading.Thread):
    def __init__(self, ring: ShmRing, source: Iterator[dict[str, Any]],
                 out: "queue.Queue[Optional[SlotRef]]") -> None:
        super().__init__(daemon=True)
        self.ring = ring
        self.source = source
        self.out = out
        self.dropped = 0

    def run(self) -> None:
        for sample in self.source:
            ref = self.ring.get_slot()  # leak: an empty sample is dropped together with its slot
            if ref is None:
                self.dropped += 1
                continue
            tokens = sample.get("tokens") or []
            if not tokens:
                self.dropped += 1
                continue
            ref.tensor()[: len(tokens)] = torch.tensor(tokens)
            self.out.put(ref)
        self.out.put(None)


class FilteringWorker(Worker):
    def run(self) -> None:
        for sample in self.source:
            tokens = sample.get("tokens") or []
            ref = self.ring.get_slot() if tokens else None  # clean: near miss, goes to the queue or is recycled
            if ref is None:
                self.dropped += 1
                continue
            if len(tokens) > ref.tensor().numel():
                ref.recycle()
                self.dropped += 1
                continue
            ref.tensor()[: len(tokens)] = torch.tensor(tokens)
            self.out.put(ref)
        self.out.put(None)


class Collator:
    def __init__(self, ring: ShmRing, inbox: "queue.Queue[Optional[SlotRef]]", size: int) -> None:
        self.ring = ring
        self.inbox = inbox
        self.size = size
        self.epoch = 0
        self.parked: dict[int, Batch] = {}
        self.by_length: dict[int, list[SlotRef]] = defaultdict(list)

    def next_batch(self) -> Optional[Batch]:
        batch = Batch(self.epoch)
        while len(batch) < self.size:
            ref = self.inbox.get()  # clean: near miss, moved into the batch; the sentinel ends a partial batch
            if ref is None:
                if len(batch):
                    self.inbox.put(None)
                    return batch
                return None
            batch.add(ref)
        return batch

    def batches(self) -> Iterator[torch.Tensor]:
        while True:
            batch = self.next_batch()  # clean: released before the yield
            if batch is None:
                return
            out = batch.stack()
            batch.release()
            yield out

    def batches_drop_last(self) -> Iterator[torch.Tensor]:
        while True:
            batch = self.next_batch()  # leak: a short last batch ends the loop unreleased
            if batch is None:
                break
            if len(batch) < self.size:
                log.info("short batch of %d at the end of epoch %d", len(batch), batch.epoch)
                break
            out = batch.stack()
            batch.release()
            yield out

    def count_tokens(self, limit: int) -> int:
        """Dry run over the first batches."""
        total = 0
        for _ in range(limit):
            batch = self.next_batch()  # leak: each batch is rebound by the next, only the last one is released
            if batch is None:
                return total
            total += int((batch.stack() != 0).sum())
        batch.release()
        return total

    def park(self, key: int) -> bool:
        batch = self.next_batch()  # clean: parked, and unpark or flush releases it
        if batch is None:
            return False
        self.flush(key)
        self.parked[key] = batch
        return True

    def unpark(self, key: int) -> Optional[torch.Tensor]:
        batch = self.parked.pop(key, None)
        if batch is None:
            return None
        out = batch.stack()
        batch.release()
        return out

    def flush(self, key: int) -> None:
        old = self.parked.pop(key, None)
        if old is not None:
            old.release()

    def scratch_mean(self, rows: int) -> torch.Tensor:
        acc = torch.zeros(self.ring.storage.shape[1])
        with ExitStack() as stack:
            refs = [stack.enter_context(self.ring.slot()) for _ in range(rows)]  # clean: the stack exits each of them
            for ref in refs:
                acc += ref.tensor()
        return acc / max(1, rows)

    def pad_row(self, value: float) -> torch.Tensor:
        with self.ring.slot() as ref:  # clean: context manager
            ref.tensor().fill_(value)
            return ref.tensor().clone()

    def bucket(self, count: int) -> None:
        for _ in range(count):
            ref = self.ring.get_slot()  # leak: emit deletes the lists without recycling what is beyond the batch
            if ref is None:
                return
            self.by_length[ref.length // 64].append(ref)

    def emit(self, bucket: int) -> Optional[Batch]:
        refs = self.by_length.pop(bucket, [])
        if len(refs) < self.size:
            self.by_length[bucket] = refs
            return None
        batch = Batch(self.epoch)
        for ref in refs[: self.size]:
            batch.add(ref)
        return batch

    def drain_bucket(self, bucket: int) -> list[torch.Tensor]:
        rows: list[torch.Tensor] = []
        while True:
            batch = self.emit(bucket)  # clean: released after the copy
            if batch is None:
                return rows
            rows.append(batch.stack())
            batch.release()


def preview(ring: ShmRing, inbox: "queue.Queue[Optional[SlotRef]]", n: int) -> list[float]:
    collator = Collator(ring, inbox, n)
    batch = collator.next_batch()  # clean: released on both branches
    if batch is None:
        return []
    if len(batch) < n:
        batch.release()
        return []
    means = [float(r.tensor().mean()) for r in batch.refs]
    batch.release()
    return means


def first_row(ring: ShmRing, value: float) -> Optional[torch.Tensor]:
    ref = ring.get_slot(timeout=0.1)  # leak: a clone is returned, the slot stays taken
    if ref is None:
        return None
    row = ref.tensor()
    row.fill_(value)
    return row.clone()
