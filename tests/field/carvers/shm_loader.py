"""Shared-memory slots between loader threads and the training loop."""
from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional


@dataclass(eq=False)
class Slot:
    index: int
    size: int
    payload: bytearray = field(default_factory=bytearray)
    generation: int = 0


@dataclass
class Sample:
    key: str
    raw: bytes
    label: int


class SlotRing:
    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._free: List[Slot] = [Slot(i, size) for i in range(count)]
        self._quarantine: List[Slot] = []
        self._cv = threading.Condition()

    def borrow(self) -> Slot:
        with self._cv:
            while not self._free:
                self._cv.wait()
            return self._free.pop()

    def borrow_nowait(self) -> Optional[Slot]:
        with self._cv:
            return self._free.pop() if self._free else None

    def borrow_fresh(self, generation: int) -> Optional[Slot]:
        """A slot not written since `generation`."""
        slot = self.borrow_nowait()  # leak: a slot that is too recent is not given back
        if slot is None:
            return None
        if slot.generation > generation:
            return None
        slot.generation += 1
        return slot

    def borrow_sized(self, nbytes: int) -> Optional[Slot]:
        slot = self.borrow_nowait()  # clean: near miss, one of the wrong size goes back before None is returned
        if slot is not None and slot.size < nbytes:
            self.give_back(slot)
            slot = None
        return slot

    def borrow_batch(self, count: int) -> List[Slot]:
        got: List[Slot] = []
        while len(got) < count:
            slot = self.borrow_nowait()  # leak: a short batch is answered with [] and the slots taken are lost
            if slot is None:
                return []
            got.append(slot)
        return got

    def borrow_upto(self, count: int) -> List[Slot]:
        got: List[Slot] = []
        for _ in range(count):
            slot = self.borrow_nowait()  # clean: near miss, what was taken so far is returned
            if slot is None:
                break
            got.append(slot)
        return got

    def give_back(self, slot: Slot) -> None:
        slot.payload.clear()
        with self._cv:
            self._free.append(slot)
            self._cv.notify()


class LoaderWorker(threading.Thread):
    def __init__(self, ring: SlotRing, inbox: "queue.Queue[Optional[Sample]]", outbox: "queue.Queue[Slot]",
                 decode: Callable[[bytes], bytes]) -> None:
        super().__init__(daemon=True)
        self.ring = ring
        self.inbox = inbox
        self.outbox = outbox
        self.decode = decode
        self.errors = 0

    def run(self) -> None:
        while True:
            sample = self.inbox.get()
            if sample is None:
                return
            slot = self.ring.borrow()  # clean: near miss, given back when decoding fails, else queued for the consumer
            try:
                slot.payload.extend(self.decode(sample.raw))
            except ValueError:
                self.errors += 1
                self.ring.give_back(slot)
                continue
            self.outbox.put(slot)


class AugmentingWorker(LoaderWorker):
    def run(self) -> None:
        while True:
            slot = self.ring.borrow()  # leak: the stop marker returns with a slot in hand
            sample = self.inbox.get()
            if sample is None:
                return
            slot.payload.extend(self.decode(sample.raw)[::-1])
            self.outbox.put(slot)


class LossyWorker(LoaderWorker):
    """Drops samples when the consumer is too slow."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dropped = 0

    def run(self) -> None:
        while (sample := self.inbox.get()) is not None:
            slot = self.ring.borrow()  # leak: when the outbox is full the slot is dropped along with the sample
            slot.payload.extend(sample.raw)
            try:
                self.outbox.put_nowait(slot)
            except queue.Full:
                self.dropped += 1


class Prefetcher:
    def __init__(self, ring: SlotRing, workers: int, decode: Callable[[bytes], bytes]) -> None:
        self.ring = ring
        self.inbox: "queue.Queue[Optional[Sample]]" = queue.Queue()
        self.outbox: "queue.Queue[Slot]" = queue.Queue()
        self.workers = [LoaderWorker(ring, self.inbox, self.outbox, decode) for _ in range(workers)]
        self.parked: Dict[str, Slot] = {}

    def start(self) -> None:
        for worker in self.workers:
            worker.start()

    def next_batch(self, count: int) -> List[bytes]:
        out: List[bytes] = []
        for _ in range(count):
            slot = self.outbox.get()
            out.append(bytes(slot.payload))
            self.ring.give_back(slot)
        return out

    def park(self, key: str, payload: bytes) -> bool:
        if key in self.parked:
            return False
        slot = self.ring.borrow_sized(len(payload))  # clean: near miss, kept in parked until unpark
        if slot is None:
            return False
        slot.payload.extend(payload)
        self.parked[key] = slot
        return True

    def unpark(self, key: str) -> Optional[bytes]:
        slot = self.parked.pop(key, None)
        if slot is None:
            return None
        payload = bytes(slot.payload)
        self.ring.give_back(slot)
        return payload

    def broadcast(self, payload: bytes, copies: int) -> int:
        slots = self.ring.borrow_upto(copies)  # clean: all are queued for the consumer
        for slot in slots:
            slot.payload.extend(payload)
            self.outbox.put(slot)
        return len(slots)

    def checksum(self, payloads: List[bytes]) -> int:
        slots = self.ring.borrow_upto(len(payloads))  # leak: a short loan returns -1 with the slots that it got
        if len(slots) < len(payloads):
            return -1
        total = 0
        for slot, payload in zip(slots, payloads):
            slot.payload.extend(payload)
            total += sum(slot.payload)
            self.ring.give_back(slot)
        return total

    def stop(self) -> None:
        for _ in self.workers:
            self.inbox.put(None)
        for worker in self.workers:
            worker.join()
        while not self.outbox.empty():
            self.ring.give_back(self.outbox.get_nowait())
        for key in list(self.parked):
            self.unpark(key)


def collate(ring: SlotRing, samples: List[Sample]) -> Optional[bytes]:
    slot = ring.borrow()  # clean: near miss, both branches give back
    for sample in samples:
        if len(slot.payload) + len(sample.raw) > slot.size:
            ring.give_back(slot)
            return None
        slot.payload.extend(sample.raw)
    merged = bytes(slot.payload)
    ring.give_back(slot)
    return merged


def collate_labelled(ring: SlotRing, samples: List[Sample], min_label: int = 0) -> Dict[int, bytes]:
    groups: Dict[int, Slot] = {}
    for sample in samples:
        slot = groups.get(sample.label)
        if slot is None:
            slot = groups[sample.label] = ring.borrow()  # leak: groups below min_label are left out of the give-back loop
        slot.payload.extend(sample.raw)
    out: Dict[int, bytes] = {}
    for label, slot in groups.items():
        if label < min_label:
            continue
        out[label] = bytes(slot.payload)
        ring.give_back(slot)
    return out
