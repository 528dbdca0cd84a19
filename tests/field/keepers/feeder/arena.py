"""Shared-memory arena of equal cells with reference counts per cell."""
from __future__ import annotations

import threading
from typing import Dict, List, Optional

import numpy as np


class Cell:
    def __init__(self, index: int, array: np.ndarray) -> None:
        self.index = index
        self.array = array
        self.refs = 0


class ShmArena:
    def __init__(self, cells: int, numel: int) -> None:
        self._cond = threading.Condition()
        self._cells = [Cell(i, np.zeros(numel, dtype=np.int32)) for i in range(cells)]
        self._idle: List[Cell] = list(self._cells)

    def acquire(self, timeout: Optional[float] = None) -> Optional[Cell]:
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._idle), timeout):
                return None
            cell = self._idle.pop()
            cell.refs = 1
            return cell

    def retain(self, cell: Cell) -> Cell:
        with self._cond:
            cell.refs += 1
        return cell

    def release(self, cell: Cell) -> None:
        with self._cond:
            cell.refs -= 1
            if cell.refs == 0:
                self._idle.append(cell)
                self._cond.notify()
