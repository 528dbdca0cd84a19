"""The shared-memory ring: numbered cells of one size."""
from __future__ import annotations

import mmap
import multiprocessing as mp
from typing import Optional


class Cell:
    __slots__ = ("number", "mem", "used")

    def __init__(self, number: int, mem: memoryview) -> None:
        self.number, self.mem, self.used = number, mem, 0

    def write(self, blob: bytes) -> None:
        self.mem[: len(blob)] = blob
        self.used = len(blob)

    def read(self) -> bytes:
        return bytes(self.mem[: self.used])


class ShmRing:
    def __init__(self, cells: int, cell_bytes: int) -> None:
        self.cell_bytes = cell_bytes
        self._map = mmap.mmap(-1, cells * cell_bytes)
        self._view = memoryview(self._map)
        self._vacant = mp.Array("b", [1] * cells)
        self._count = mp.Semaphore(cells)

    def _cell(self, number: int) -> Cell:
        at = number * self.cell_bytes
        return Cell(number, self._view[at:at + self.cell_bytes])

    def obtain(self, timeout: Optional[float] = None) -> Optional[Cell]:
        """A vacant cell, or None after the timeout."""
        if not self._count.acquire(timeout=timeout):  # clean: near miss, counts the cell, recycle releases it
            return None
        with self._vacant.get_lock():
            number = self._vacant[:].index(1)
            self._vacant[number] = 0
        return self._cell(number)

    def obtain_for(self, blob: bytes, timeout: Optional[float] = None) -> Optional[Cell]:
        cell = self.obtain(timeout)  # leak: too large a blob makes it answer None with the cell in hand
        if cell is None or len(blob) > self.cell_bytes:
            return None
        cell.write(blob)
        return cell

    def attach(self, number: int, used: int) -> Cell:
        """The consumer's view of a cell which a worker obtained; it is the consumer who recycles it."""
        cell = self._cell(number)
        cell.used = used
        return cell

    def recycle(self, cell: Cell) -> None:
        cell.mem.release()
        with self._vacant.get_lock():
            self._vacant[cell.number] = 1
        self._count.release()

    def close(self) -> None:
        self._view.release()
        self._map.close()
