"""Table of shared memory slots that workers fill and the trainer empties."""
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Dict, List, Optional

import numpy as np


@dataclass
class Slot:
    number: int
    nbytes: int
    array: np.ndarray
    filled: int = 0


class SlotTable:
    def __init__(self, sizes: List[int]):
        self._mutex = threading.Lock()
        self._ready = threading.Condition(self._mutex)
        self._open: List[Slot] = [Slot(i, n, np.empty(n, dtype=np.uint8)) for i, n in enumerate(sizes)]
        self._claimed: Dict[int, Slot] = {}
        self.high_water = 0

    def _mark(self, slot: Slot) -> Slot:
        self._claimed[slot.number] = slot
        self.high_water = max(self.high_water, len(self._claimed))
        return slot

    def claim(self, timeout: Optional[float] = None) -> Optional[Slot]:
        with self._ready:
            if not self._ready.wait_for(lambda: bool(self._open), timeout):
                return None
            return self._mark(self._open.pop())

    def claim_fitting(self, nbytes: int) -> Optional[Slot]:
        """The smallest open slot of at least nbytes."""
        with self._ready:
            self._open.sort(key=lambda s: s.nbytes, reverse=True)
            while self._open:
                slot = self._open.pop()  # leak: slots that are too small are popped and never put back
                if slot.nbytes >= nbytes:
                    return self._mark(slot)
            return None

    def claim_roomy(self, nbytes: int) -> Optional[Slot]:
        """Any open slot of at least nbytes."""
        with self._ready:
            small: List[Slot] = []
            found = None
            while self._open and found is None:
                slot = self._open.pop()  # clean: near miss, marked and returned, or put back from small
                if slot.nbytes >= nbytes:
                    found = self._mark(slot)
                else:
                    small.append(slot)
            self._open.extend(small)
            return found

    def reclaim(self, slot: Slot) -> None:
        with self._ready:
            del self._claimed[slot.number]
            slot.filled = 0
            self._open.append(slot)
            self._ready.notify()

    def reclaim_all(self, slots: List[Slot]) -> None:
        for slot in slots:
            self.reclaim(slot)
        slots.clear()
