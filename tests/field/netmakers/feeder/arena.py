"""Rows of one pinned token matrix; the numbers of free rows are kept in a heap."""
from __future__ import annotations

import heapq
import threading

import torch


class Arena:
    def __init__(self, rows: int, width: int) -> None:
        self.tokens = torch.zeros(rows, width, dtype=torch.int32).pin_memory()
        self.width = width
        self._free = list(range(rows))
        self._cv = threading.Condition()

    def allot(self) -> int:
        """Waits until there is a row."""
        with self._cv:
            self._cv.wait_for(lambda: self._free)
            return heapq.heappop(self._free)  # clean: handed to the caller

    def allot_below(self, bound: int) -> int | None:
        with self._cv:
            if not self._free:
                return None
            row = heapq.heappop(self._free)  # leak: a row at or above the bound is not pushed again
            return row if row < bound else None

    def yield_back(self, row: int) -> None:
        with self._cv:
            heapq.heappush(self._free, row)
            self._cv.notify()


class RowLease:
    """Owns a row until close(), or until detach() hands the number to somebody else."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.row: int | None = arena.allot()  # clean: close() gives it back unless it was detached

    def detach(self) -> int:
        row, self.row = self.row, None
        return row

    def close(self) -> None:
        if self.row is not None:
            self.arena.yield_back(self.row)
            self.row = None

    def __enter__(self) -> "RowLease":
        return self

    def __exit__(self, *exc) -> None:
        self.close()
