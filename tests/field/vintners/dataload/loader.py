"""The loader: workers fill slots, the trainer drains batches."""
from __future__ import annotations

import queue
import random
import threading
import zlib
from typing import Callable, List, Optional

from .reader import ShardReader, fill_slots
from .shm import ShardMap, Slot, SlotRing


class Batch:
    def __init__(self, ring: SlotRing, slots: List[Slot]) -> None:
        self._ring = ring
        self._slots: Optional[List[Slot]] = slots

    def rows(self) -> List[memoryview]:
        return [s.view[: s.filled] for s in self._slots or ()]

    def recycle(self) -> None:
        slots, self._slots = self._slots, None
        for s in slots or ():
            self._ring.put_back(s)


class Loader:
    def __init__(self, ring: SlotRing, reader: ShardReader, batch: int, depth: int, seed: int) -> None:
        self.ring = ring
        self.reader = reader
        self.batch = batch
        self.rng = random.Random(seed)
        self._out: "queue.Queue[Batch]" = queue.Queue(depth)
        self._stop = threading.Event()
        self._worker: Optional[threading.Thread] = None

    def start(self) -> None:
        self._worker = threading.Thread(target=self._produce, daemon=True)
        self._worker.start()

    def _produce(self) -> None:
        while not self._stop.is_set():
            filled = fill_slots(self.ring, self.reader, self.rng, self.batch)  # clean: near miss, in batch
            slots = list(filled)
            batch = Batch(self.ring, slots)
            while True:
                try:
                    self._out.put(batch, timeout=0.1)
                    break
                except queue.Full:
                    if self._stop.is_set():
                        batch.recycle()
                        break

    def next_batch(self) -> Batch:
        return self._out.get()

    def stop(self) -> None:
        self._stop.set()
        if self._worker is not None:
            self._worker.join()
        while not self._out.empty():
            self._out.get_nowait().recycle()


def train(loader: Loader, step: Callable[[List[memoryview]], float], n: int) -> float:
    loader.start()
    loss = 0.0
    for _ in range(n):
        batch = loader.next_batch()  # clean: recycled after the step
        loss = step(batch.rows())
        batch.recycle()
    loader.stop()
    return loss


def skip_batches(loader: Loader, n: int) -> int:
    """Fast-forward after a restart."""
    seen = 0
    while seen < n:
        batch = loader.next_batch()  # leak: counted and dropped, the slots are not recycled
        seen += len(batch.rows())
    return seen


def peek(loader: Loader, limit: int) -> List[bytes]:
    rows: List[bytes] = []
    batch = loader.next_batch()  # clean: near miss, break leaves the loop, not the function
    for row in batch.rows():
        if len(rows) == limit:
            break
        rows.append(bytes(row))
    batch.recycle()
    return rows


def first_nonzero(ring: SlotRing, reader: ShardReader, rng: random.Random, n: int) -> Optional[bytes]:
    for slot in fill_slots(ring, reader, rng, n):  # leak: the found slot is not put back on return
        row = bytes(slot.view[: slot.filled])
        if any(row):
            return row
        ring.put_back(slot)
    return None


def scratch_copy(ring: SlotRing, data: bytes) -> int:
    with ring.slot() as slot:  # clean: the manager puts it back
        slot.write(data)
        return zlib.adler32(slot.view[: slot.filled])


def pack_rows(ring: SlotRing, rows: List[bytes]) -> Optional[Batch]:
    slots = ring.grab_many(len(rows), timeout=1.0)  # clean: handed over in the batch
    if slots is None:
        return None
    for slot, row in zip(slots, rows):
        slot.write(row)
    return Batch(ring, slots)


def replay(ring: SlotRing, rows: List[bytes], step: Callable[[List[memoryview]], float]) -> Optional[float]:
    batch = pack_rows(ring, rows)  # clean: None-checked and recycled
    if batch is None:
        return None
    loss = step(batch.rows())
    batch.recycle()
    return loss


def smoke(maps: ShardMap, names: List[str], window: int) -> List[int]:
    sizes: List[int] = []
    reader: Optional[ShardReader] = None
    for name in names:
        reader = ShardReader(maps, name, window).open()  # leak: every reader but the last is rebound open
        sizes.append(len(reader.draw(random.Random(0))))
    if reader is not None:
        reader.close()
    return sizes
