"""The table of shared memory slots. Indexes travel between processes, memory does not."""
from __future__ import annotations

import multiprocessing as mp
import queue
from multiprocessing import shared_memory

import numpy as np


class SlotTable:
    def __init__(self, count: int, nbytes: int, name: str = "loader"):
        self.nbytes = nbytes
        self.segments = [
            shared_memory.SharedMemory(f"{name}-{i}", create=True, size=nbytes) for i in range(count)
        ]
        self._idle: mp.Queue = mp.Queue()
        for i in range(count):
            self._idle.put(i)

    def checkout(self, timeout: float | None = None) -> int | None:
        try:
            return self._idle.get(timeout=timeout)
        except queue.Empty:
            return None

    def checkin(self, index: int) -> None:
        self._idle.put(index)

    def array(self, index: int, shape: tuple[int, ...], dtype=np.int32) -> np.ndarray:
        return np.ndarray(shape, dtype=dtype, buffer=self.segments[index].buf)

    def destroy(self) -> None:
        for seg in self.segments:
            seg.close()
            seg.unlink()


class SlotRef:
    """A slot with its shape; shared by several consumers, checked in by the last one."""

    def __init__(self, table: SlotTable, index: int, shape: tuple[int, ...], readers: int = 1):
        self.table = table
        self.index = index
        self.shape = shape
        self.readers = readers

    def array(self) -> np.ndarray:
        return self.table.array(self.index, self.shape)

    def done(self) -> None:
        self.readers -= 1
        if self.readers == 0:
            self.table.checkin(self.index)
