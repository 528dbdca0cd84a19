"""Data loading into pinned slots.

Worker threads fill slots, the training loop consumes them and gives the slot
back once the copy to the device is over.
"""
from __future__ import annotations

import queue
import random
import threading
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Iterator

import torch


@dataclass
class Slot:
    no: int
    tokens: torch.Tensor
    used: int = 0
    event: Any = None


class SlotRing:
    """A fixed number of pinned slots behind a queue."""

    def __init__(self, count: int, tokens: int):
        self._q: queue.Queue[Slot] = queue.Queue()
        for i in range(count):
            self._q.put(Slot(i, torch.empty(tokens, dtype=torch.int32, pin_memory=True)))

    def pull(self, timeout: float | None = None) -> Slot:
        slot = self._q.get(timeout=timeout)  # clean: returned to the caller
        slot.used = 0
        return slot

    def pull_nowait(self) -> Slot | None:
        try:
            return self._q.get_nowait()  # clean: returned to the caller
        except queue.Empty:
            return None

    def put_back(self, slot: Slot) -> None:
        slot.event = None
        self._q.put(slot)

    def pull_aligned(self, align: int) -> Slot | None:
        """A slot whose memory begins on ``align`` bytes."""
        rejected = []
        found = None
        while found is None:
            slot = self.pull_nowait()  # clean: near miss, rejected slots are put back behind the loop
            if slot is None:
                break
            if slot.tokens.data_ptr() % align == 0:
                found = slot
            else:
                rejected.append(slot)
        for slot in rejected:
            self.put_back(slot)
        return found

    def pull_even(self) -> Slot:
        """NUMA node 0 owns the even slots."""
        slot = self.pull()  # leak: an odd slot is replaced by the next pull and lost
        while slot.no % 2:
            slot = self.pull()  # leak: an odd slot is replaced by the next pull and lost
        return slot


@dataclass
class Batch:
    slot: Slot
    ids: torch.Tensor
    meta: dict = field(default_factory=dict)


class Worker(threading.Thread):
    def __init__(self, docs: Iterable[list[int]], ring: SlotRing, out: queue.Queue, collate: Callable, stop: threading.Event):
        super().__init__(daemon=True)
        self.docs = docs
        self.ring = ring
        self.out = out
        self.collate = collate
        self.stop_event = stop

    def run(self) -> None:
        for doc in self.docs:
            if self.stop_event.is_set():
                break
            slot = self.ring.pull()  # leak: a document that collates to None continues without put_back
            ids = self.collate(doc, slot.tokens)
            if ids is None:
                continue
            slot.used = len(ids)
            self.out.put(Batch(slot, ids))
        self.out.put(None)


class PackingWorker(Worker):
    """Packs many documents into a slot."""

    def run(self) -> None:
        slot = self.ring.pull()  # clean: near miss, sent when full and the last one is put back or sent
        for doc in self.docs:
            if self.stop_event.is_set():
                break
            doc = doc[: slot.tokens.numel()]
            if slot.used + len(doc) > slot.tokens.numel():
                self.out.put(Batch(slot, slot.tokens[: slot.used]))
                slot = self.ring.pull()  # clean: the full one went to the queue first
            slot.tokens[slot.used : slot.used + len(doc)] = torch.tensor(doc, dtype=torch.int32)
            slot.used += len(doc)
        if slot.used:
            self.out.put(Batch(slot, slot.tokens[: slot.used]))
        else:
            self.ring.put_back(slot)
        self.out.put(None)


class PinnedLoader:
    def __init__(self, shards: list[Iterable], ring: SlotRing, collate: Callable, device="cuda", depth=4, packing=False):
        self.ring = ring
        self.device = device
        self.stop = threading.Event()
        self.out: queue.Queue[Batch | None] = queue.Queue(maxsize=depth)
        kind = PackingWorker if packing else Worker
        self.workers = [kind(s, ring, self.out, collate, self.stop) for s in shards]
        self.lagging: list[Slot] = []

    def _reap(self) -> None:
        keep = []
        for slot in self.lagging:
            if slot.event.query():
                self.ring.put_back(slot)
            else:
                keep.append(slot)
        self.lagging = keep

    def __iter__(self) -> Iterator[torch.Tensor]:
        for w in self.workers:
            w.start()
        alive = len(self.workers)
        while alive:
            batch = self.out.get()  # clean: near miss, its slot goes to lagging and _reap() or close() puts it back
            if batch is None:
                alive -= 1
                continue
            ids = batch.ids.to(self.device, non_blocking=True)
            batch.slot.event = torch.cuda.Event()
            batch.slot.event.record()
            self.lagging.append(batch.slot)
            self._reap()
            yield ids

    def peek(self) -> int:
        """Length of the next batch, for the schedule."""
        batch = self.out.get()  # leak: the batch is looked at and its slot is dropped
        if batch is None:
            self.out.put(None)
            return 0
        return batch.slot.used

    def close(self) -> None:
        self.stop.set()
        while any(w.is_alive() for w in self.workers) or not self.out.empty():
            try:
                batch = self.out.get(timeout=0.1)  # clean: put back while draining
            except queue.Empty:
                continue
            if batch is not None:
                self.ring.put_back(batch.slot)
        torch.cuda.synchronize()
        for slot in self.lagging:
            self.ring.put_back(slot)
        self.lagging = []


class ShuffleBuffer:
    """Holds slots and gives a random one out when it is full."""

    def __init__(self, ring: SlotRing, capacity: int, seed: int = 0):
        self.ring = ring
        self.capacity = capacity
        self.rng = random.Random(seed)
        self.held: list[Slot] = []

    def push(self, doc: list[int]) -> Slot | None:
        slot = self.ring.pull()  # clean: near miss, held and swapped out to the caller or drained
        n = min(len(doc), slot.tokens.numel())
        slot.tokens[:n] = torch.tensor(doc[:n], dtype=torch.int32)
        slot.used = n
        if len(self.held) < self.capacity:
            self.held.append(slot)
            return None
        i = self.rng.randrange(self.capacity)
        out, self.held[i] = self.held[i], slot
        return out

    def drain(self) -> Iterator[torch.Tensor]:
        self.rng.shuffle(self.held)
        while self.held:
            slot = self.held.pop()
            try:
                yield slot.tokens[: slot.used].clone()
            finally:
                self.ring.put_back(slot)

    def feed(self, docs: Iterable[list[int]], sink: Callable[[torch.Tensor], None]) -> None:
        for doc in docs:
            slot = self.push(doc)  # clean: put back after the sink
            if slot is None:
                continue
            sink(slot.tokens[: slot.used].clone())
            self.ring.put_back(slot)
        for ids in self.drain():
            sink(ids)

    def prefill(self, docs: Iterable[list[int]]) -> int:
        n = 0
        for doc in docs:
            self.push(doc)  # leak: a slot pushed out of a full buffer is ignored
            n += 1
        return n


class Reservoir:
    """A weighted sample of the documents seen so far."""

    def __init__(self, ring: SlotRing, capacity: int, seed: int = 0):
        self.ring = ring
        self.capacity = capacity
        self.rng = random.Random(seed)
        self.kept: list[Slot] = []

    def offer(self, doc: list[int], weight: float) -> bool:
        slot = self.ring.pull()  # leak: a later offer replaces it at index i without put_back
        n = min(len(doc), slot.tokens.numel())
        slot.tokens[:n] = torch.tensor(doc[:n], dtype=torch.int32)
        slot.used = n
        if len(self.kept) < self.capacity:
            self.kept.append(slot)
            return True
        i = self.rng.randrange(self.capacity)
        if self.rng.random() < weight:
            self.kept[i] = slot
            return True
        self.ring.put_back(slot)
        return False

    def clear(self) -> None:
        while self.kept:
            self.ring.put_back(self.kept.pop())
