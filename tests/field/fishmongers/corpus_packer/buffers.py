"""Row buffers; numpy arrays that are used again instead of allocated anew."""
from __future__ import annotations

import threading

import numpy as np


class PoolDry(RuntimeError):
    pass


class RowBuffer:
    __slots__ = ("ids", "used")

    def __init__(self, length: int) -> None:
        self.ids = np.zeros(length, np.uint32)
        self.used = 0

    def room(self) -> int:
        return len(self.ids) - self.used

    def append(self, tokens: np.ndarray) -> None:
        self.ids[self.used : self.used + len(tokens)] = tokens
        self.used += len(tokens)


class BufferPool:
    def __init__(self, length: int, count: int) -> None:
        self.length = length
        self._rows = [RowBuffer(length) for _ in range(count)]
        self._changed = threading.Condition()

    def rent(self, wait: float = 10.0) -> RowBuffer:
        with self._changed:
            if not self._changed.wait_for(lambda: self._rows, wait):
                raise PoolDry(f"no row buffer within {wait}s")
            row = self._rows.pop()  # clean: returned
        row.used = 0
        return row

    def hand_back(self, row: RowBuffer) -> None:
        with self._changed:
            self._rows.append(row)
            self._changed.notify()
