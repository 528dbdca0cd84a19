"""A frame collects the cells an operator uses and lets go of them together."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator, List

import torch

from .cells import Cell, CellStore


class Frame:
    def __init__(self, store: CellStore):
        self.store = store
        self.cells: List[Cell] = []
        self.sealed = False

    def new(self, *shape: int) -> torch.Tensor:
        n = 1
        for s in shape:
            n *= s
        c = self.store.cell(n)  # clean: kept in cells, which drop() lets go
        self.cells.append(c)
        return c.as_tensor(*shape)

    def adopt(self, c: Cell) -> torch.Tensor:
        """Takes over the caller's hold."""
        self.cells.append(c)
        return c.data

    def new_unsealed(self, *shape: int) -> torch.Tensor:
        n = 1
        for s in shape:
            n *= s
        c = self.store.cell(n)  # leak: in a sealed frame the cell is raised past, in no list
        if self.sealed:
            raise RuntimeError("frame is sealed")
        self.cells.append(c)
        return c.as_tensor(*shape)

    def escape(self, i: int) -> Cell:
        """A cell that outlives the frame, with a hold of its own."""
        return self.cells[i].hold()  # clean: returned to the caller

    def drop(self) -> None:
        while self.cells:
            self.cells.pop().unhold()


@contextmanager
def frame(store: CellStore) -> Iterator[Frame]:
    f = Frame(store)
    try:
        yield f
    finally:
        f.drop()
