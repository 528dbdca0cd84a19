"""Batches out of cells."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import AsyncIterator, Optional

import numpy as np

from .cells import Cell, CellBank, LineClosed

log = logging.getLogger("feedline.batch")


@dataclass
class Batch:
    cells: list[Cell] = field(default_factory=list)
    bonus: Optional[Cell] = None
    step: int = -1

    def arrays(self, width: int) -> np.ndarray:
        out = np.zeros((len(self.cells), width), dtype=np.int64)
        for i, c in enumerate(self.cells):
            ids = c.payload["ids"][:width]
            out[i, :len(ids)] = ids
        return out

    def release(self) -> None:
        for c in self.cells:
            c.free()
        self.cells.clear()


class Batcher:
    def __init__(self, bank: CellBank, size: int):
        self.bank = bank
        self.size = size

    async def run(self, cells: AsyncIterator[Cell]) -> AsyncIterator[Batch]:
        batch = Batch()
        async for cell in cells:
            batch.cells.append(cell)
            if len(batch.cells) == self.size:
                yield batch
                batch = Batch()
        batch.release()

    async def meta_cell(self, step: int) -> Cell:
        cell = await self.bank.acquire()  # clean: returned to the caller
        cell.payload = {"step": step, "ids": []}
        return cell

    async def decorate(self, batch: Batch, step: int) -> None:
        """Adds a cell with the bookkeeping of the step."""
        batch.step = step
        batch.bonus = await self.meta_cell(step)  # leak: release() frees the cells of the batch but not bonus

    async def append_meta(self, batch: Batch, step: int) -> bool:
        try:
            cell = await self.meta_cell(step)  # clean: near miss, in the cells of the batch it is released with them
        except LineClosed:
            return False
        batch.cells.append(cell)
        return True

    def pad(self, batch: Batch) -> int:
        """Fill up with copies of the last sample."""
        n = 0
        while batch.cells and len(batch.cells) < self.size:
            batch.cells.append(batch.cells[-1].share())  # clean: near miss, release() frees once for each entry
            n += 1
        return n

    def pad_from_bank(self, batch: Batch) -> int:
        n = 0
        while len(batch.cells) < self.size:
            cell = self.bank.acquire_if_plenty(2)  # clean: it is in the batch, for None the loop ends
            if cell is None:
                break
            cell.payload = {"ids": []}
            batch.cells.append(cell)
            n += 1
        return n
