"""Shared-memory data loader: slots are filled by workers and lent to the training loop."""
from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np


class SlotRing:
    """Fixed number of equally sized slots in one block of memory."""

    def __init__(self, slots: int, width: int) -> None:
        self.memory = np.zeros((slots, width), dtype=np.float32)
        self._free: "queue.Queue[int]" = queue.Queue()
        for index in range(slots):
            self._free.put(index)

    def acquire(self) -> int:
        return self._free.get()  # clean: returned to the caller

    def poll(self) -> int:
        """Slot number, or -1 when all are lent."""
        try:
            return self._free.get_nowait()  # clean: returned to the caller
        except queue.Empty:
            return -1

    def release(self, slot: int) -> None:
        self._free.put(slot)

    def resize_probe(self, wanted: int) -> bool:
        """Whether `wanted` slots are free right now."""
        seen: List[int] = []
        while len(seen) < wanted and not self._free.empty():
            seen.append(self._free.get())  # leak: finding enough returns True before the slots are put back
        if len(seen) == wanted:
            return True
        for slot in seen:
            self._free.put(slot)
        return False


class ReadGate:
    """Counts readers so that the cache is not rewritten under them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.readers = 0

    def enter_read(self) -> None:
        with self._lock:
            self.readers += 1  # clean: the caller's read share

    def exit_read(self) -> None:
        with self._lock:
            self.readers -= 1


@dataclass
class Sample:
    index: int
    data: np.ndarray


class FillWorker(threading.Thread):
    def __init__(self, ring: SlotRing, source: Callable[[int], Optional[Sample]], out: "queue.Queue[Any]") -> None:
        super().__init__(daemon=True)
        self.ring = ring
        self.source = source
        self.out = out
        self.todo: "queue.Queue[Optional[int]]" = queue.Queue()

    def run(self) -> None:
        while True:
            index = self.todo.get()
            if index is None:
                break
            slot = self.ring.acquire()  # leak: a sample the source does not have is skipped with the slot lent
            sample = self.source(index)
            if sample is None:
                continue
            self.ring.memory[slot, : sample.data.size] = sample.data
            self.out.put((index, slot))


class OrderedLoader:
    """Yields rows in index order; a row is valid until the next one is asked for."""

    def __init__(self, ring: SlotRing, out: "queue.Queue[Tuple[int, int]]", length: int) -> None:
        self.ring = ring
        self.out = out
        self.length = length
        self._early: Dict[int, int] = {}
        self._current: Optional[int] = None

    def __iter__(self) -> Iterator[np.ndarray]:
        for index in range(self.length):
            while index not in self._early:
                arrived, slot = self.out.get()
                injected = self._early.pop(arrived, None)
                if injected is not None:
                    self.ring.release(injected)
                self._early[arrived] = slot
            if self._current is not None:
                self.ring.release(self._current)
            self._current = self._early.pop(index)
            yield self.ring.memory[self._current]
        self.close()

    def inject(self, index: int, row: np.ndarray) -> bool:
        """Place a row by hand, before its turn."""
        if index in self._early:
            return False
        slot = self.ring.poll()  # clean: near miss, -1 is the empty ring; kept in _early, which close releases
        if slot < 0:
            return False
        self.ring.memory[slot, : row.size] = row
        self._early[index] = slot
        return True

    def close(self) -> None:
        if self._current is not None:
            self.ring.release(self._current)
            self._current = None
        while self._early:
            self.ring.release(self._early.popitem()[1])


class Collator:
    def __init__(self, ring: SlotRing, gate: ReadGate, cache: Dict[int, np.ndarray]) -> None:
        self.ring = ring
        self.gate = gate
        self.cache = cache

    def gather(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        slots = [self.ring.acquire() for _ in rows]  # leak: the filtered list is bound to the name and the other slots are lost
        for slot, row in zip(slots, rows):
            self.ring.memory[slot, : row.size] = row
        slots = [slot for slot in slots if self.ring.memory[slot].any()]
        batch = self.ring.memory[slots].copy()
        for slot in slots:
            self.ring.release(slot)
        return batch

    def gather_all(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        slots = [self.ring.acquire() for _ in rows]  # clean: near miss, only the used list is filtered and all are released
        for slot, row in zip(slots, rows):
            self.ring.memory[slot, : row.size] = row
        used = [slot for slot in slots if self.ring.memory[slot].any()]
        batch = self.ring.memory[used].copy()
        while slots:
            self.ring.release(slots.pop())
        return batch

    def lookup(self, index: int) -> Optional[np.ndarray]:
        self.gate.enter_read()  # leak: a hit returns its copy without leaving the gate
        row = self.cache.get(index)
        if row is not None:
            return row.copy()
        self.gate.exit_read()
        return None

    def contains(self, index: int) -> bool:
        self.gate.enter_read()  # clean: left before either return
        hit = index in self.cache
        self.gate.exit_read()
        return hit

    def scale(self, row: np.ndarray, factor: float) -> np.ndarray:
        slot = self.ring.poll()  # leak: zero is a slot number too and is taken for none
        if slot <= 0:
            return row * factor
        self.ring.memory[slot, : row.size] = row * factor
        scaled = self.ring.memory[slot, : row.size].copy()
        self.ring.release(slot)
        return scaled
