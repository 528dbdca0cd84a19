"""Data loader over shared-memory slots.

Worker processes decode samples into slots of one shared segment and report the slot number;
the trainer copies a batch out and vacates the slot.
"""
from __future__ import annotations

import heapq
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from multiprocessing import shared_memory
from typing import Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np

log = logging.getLogger(__name__)

NO_SLOT = -1


class SlotTable:
    """Bitmap of the slots in the segment."""

    def __init__(self, segment: shared_memory.SharedMemory, slots: int, slot_bytes: int):
        self.segment = segment
        self.slot_bytes = slot_bytes
        self._busy = [False] * slots
        self._owner: Dict[int, str] = {}
        self._cv = threading.Condition()

    def claim(self, who: str) -> int:
        """A free slot, or NO_SLOT."""
        with self._cv:
            for i, busy in enumerate(self._busy):
                if not busy:
                    self._busy[i] = True
                    self._owner[i] = who
                    return i
        return NO_SLOT

    def claim_wait(self, who: str) -> int:
        with self._cv:
            while all(self._busy):
                self._cv.wait()
            i = self._busy.index(False)
            self._busy[i] = True
            self._owner[i] = who
            return i

    def vacate(self, slot: int) -> None:
        with self._cv:
            self._busy[slot] = False
            self._owner.pop(slot, None)
            self._cv.notify()

    def view(self, slot: int) -> np.ndarray:
        start = slot * self.slot_bytes
        return np.frombuffer(self.segment.buf, dtype=np.uint8, count=self.slot_bytes, offset=start)


@dataclass
class Decoded:
    seq: int
    slot: int
    nbytes: int


class Decoder:
    def __init__(self, table: SlotTable, decode: Callable[[bytes, np.ndarray], int]):
        self.table = table
        self.decode = decode
        self.rejected = 0

    def run_one(self, seq: int, raw: bytes) -> Optional[Decoded]:
        """Decode into a slot that goes to the caller; None when the sample is rejected."""
        slot = self.table.claim_wait("decoder")  # clean: vacated on rejection, else handed to the caller
        nbytes = self.decode(raw, self.table.view(slot))
        if nbytes <= 0:
            self.rejected += 1
            self.table.vacate(slot)
            return None
        return Decoded(seq, slot, nbytes)

    def run_many(self, raws: List[bytes]) -> List[Decoded]:
        results = []
        for seq, raw in enumerate(raws):
            slot = self.table.claim("batch")  # leak: a rejected sample goes on without vacating
            if slot == NO_SLOT:
                break
            nbytes = self.decode(raw, self.table.view(slot))
            if nbytes <= 0:
                self.rejected += 1
                continue
            results.append(Decoded(seq, slot, nbytes))
        return results

    def probe(self, raw: bytes) -> Tuple[bool, int]:
        item = self.run_one(0, raw)  # clean: vacated when there is an item
        if item is None:
            return False, 0
        first = int(self.table.view(item.slot)[0])
        self.table.vacate(item.slot)
        return True, first


class ReorderBuffer:
    """Delivers decoded items in sequence order."""

    def __init__(self, table: SlotTable, decoder: Decoder, window: int):
        self.table = table
        self.decoder = decoder
        self.window = window
        self._heap: List[Tuple[int, int, int]] = []
        self._next = 0
        self._late: Dict[int, Decoded] = {}

    def feed(self, seq: int, raw: bytes) -> None:
        item = self.decoder.run_one(seq, raw)  # clean: near miss, the heap is emptied by pull or reset
        if item is None:
            return
        heapq.heappush(self._heap, (item.seq, item.slot, item.nbytes))

    def feed_late(self, seq: int, raw: bytes) -> bool:
        """Items behind the window are kept aside for the epoch summary."""
        if seq >= self._next:
            self.feed(seq, raw)
            return True
        item = self.decoder.run_one(seq, raw)  # leak: _late is replaced by reset with its slots claimed
        if item is not None:
            self._late[seq] = item
        return False

    def pull(self) -> Optional[np.ndarray]:
        if not self._heap or self._heap[0][0] > self._next + self.window:
            return None
        seq, slot, nbytes = heapq.heappop(self._heap)
        out = self.table.view(slot)[:nbytes].copy()
        self.table.vacate(slot)
        self._next = seq + 1
        return out

    def late_bytes(self) -> int:
        return sum(item.nbytes for item in self._late.values())

    def reset(self) -> None:
        while self._heap:
            _, slot, _ = heapq.heappop(self._heap)
            self.table.vacate(slot)
        self._late = {}
        self._next = 0


class SampleCache:
    """Keeps hot samples resident in slots; evicts the coldest."""

    def __init__(self, table: SlotTable, capacity: int):
        self.table = table
        self.capacity = capacity
        self._entries: "OrderedDict[str, int]" = OrderedDict()
        self._labels: Dict[str, int] = {}

    def put(self, key: str, data: bytes) -> bool:
        if key in self._entries:
            self._entries.move_to_end(key)
            return True
        slot = self.table.claim(key)  # clean: near miss, eviction and clear vacate the entry
        if slot == NO_SLOT:
            return False
        self.table.view(slot)[:len(data)] = np.frombuffer(data, dtype=np.uint8)
        self._entries[key] = slot
        while len(self._entries) > self.capacity:
            _, cold = self._entries.popitem(last=False)
            self.table.vacate(cold)
        return True

    def put_label(self, key: str, data: bytes) -> bool:
        slot = self.table.claim(key)  # leak: a key that is there already has its slot overwritten
        if slot == NO_SLOT:
            return False
        self.table.view(slot)[:len(data)] = np.frombuffer(data, dtype=np.uint8)
        self._labels[key] = slot
        return True

    def clear(self) -> None:
        for slot in self._entries.values():
            self.table.vacate(slot)
        for slot in self._labels.values():
            self.table.vacate(slot)
        self._entries.clear()
        self._labels.clear()


def iterate(table: SlotTable, decoder: Decoder, raws: List[bytes]) -> Iterator[np.ndarray]:
    """Batches by view: each view is valid until the next one is asked for."""
    for seq, raw in enumerate(raws):
        item = decoder.run_one(seq, raw)  # clean: vacated when the consumer comes back or closes
        if item is None:
            continue
        try:
            yield table.view(item.slot)[:item.nbytes]
        finally:
            table.vacate(item.slot)


def iterate_limited(
    table: SlotTable, decoder: Decoder, raws: List[bytes], limit: int
) -> Iterator[np.ndarray]:
    budget = limit
    for seq, raw in enumerate(raws):
        item = decoder.run_one(seq, raw)  # leak: over the limit it returns with the slot
        if item is None:
            continue
        if item.nbytes > budget:
            return
        budget -= item.nbytes
        yield table.view(item.slot)[:item.nbytes]
        table.vacate(item.slot)


def collate_many(table: SlotTable, decoder: Decoder, raws: List[bytes]) -> List[bytes]:
    items = decoder.run_many(raws)  # clean: every item is vacated in the loop
    out = []
    for item in items:
        out.append(table.view(item.slot)[:item.nbytes].tobytes())
        table.vacate(item.slot)
    return out


def longest(decoder: Decoder, table: SlotTable, raws: List[bytes]) -> int:
    items = decoder.run_many(raws)  # leak: only the longest item is vacated
    if not items:
        return 0
    best = max(items, key=lambda item: item.nbytes)
    size = best.nbytes
    table.vacate(best.slot)
    return size
