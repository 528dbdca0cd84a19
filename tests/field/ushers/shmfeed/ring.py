from __future__ import annotations

from dataclasses import dataclass
from multiprocessing import shared_memory
from typing import Optional


@dataclass
class Cell:
    index: int
    view: memoryview
    nbytes: int = 0


class ShmRing:
    """Cells of equal size in one shared-memory segment."""

    def __init__(self, name: str, cells: int, cell_bytes: int) -> None:
        self._shm = shared_memory.SharedMemory(name=name, create=True, size=cells * cell_bytes)
        self._vacant = list(range(cells))
        self.cell_bytes = cell_bytes

    def borrow_cell(self) -> Optional[Cell]:
        if not self._vacant:
            return None
        i = self._vacant.pop()
        return Cell(i, self._shm.buf[i * self.cell_bytes : (i + 1) * self.cell_bytes])

    def vacate_cell(self, cell: Cell) -> None:
        cell.view.release()
        self._vacant.append(cell.index)

    def destroy(self) -> None:
        self._shm.close()
        self._shm.unlink()
