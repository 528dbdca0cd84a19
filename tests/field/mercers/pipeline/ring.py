"""Ring of activation buffers between two neighbouring stages."""
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import List, Optional


@dataclass(eq=False)
class Cell:
    index: int
    data: bytearray
    filled: int = 0


class ActivationRing:
    """Producer takes an empty cell, consumer retires it."""

    def __init__(self, cells: int, nbytes: int) -> None:
        self._cells = [Cell(i, bytearray(nbytes)) for i in range(cells)]
        self._empty: List[Cell] = list(self._cells)
        self._cv = threading.Condition()

    def produce(self, timeout: float = 1.0) -> Optional[Cell]:
        with self._cv:
            if not self._cv.wait_for(lambda: bool(self._empty), timeout):
                return None
            return self._empty.pop(0)

    def retire(self, cell: Cell) -> None:
        with self._cv:
            cell.filled = 0
            self._empty.append(cell)
            self._cv.notify()

    def compact(self) -> int:
        """Reorders the empty cells so that neighbours are used one after the other."""
        with self._cv:
            self._empty.sort(key=lambda c: c.index)
            return len(self._empty)


class MicrobatchTable:
    """Numbers micro batches. A number is in use from assign to retire_number."""

    def __init__(self, depth: int) -> None:
        self._free = list(range(depth))
        self.assigned = 0

    def assign(self) -> int:
        """-1 when the pipeline is full."""
        if not self._free:
            return -1
        self.assigned += 1
        return self._free.pop()

    def retire_number(self, mb: int) -> None:
        self._free.append(mb)
