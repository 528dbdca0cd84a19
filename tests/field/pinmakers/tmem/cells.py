"""Cells are storages with a count of holders; the store keeps idle ones by size class."""
from __future__ import annotations

from typing import Dict, List, Optional

import torch


class Cell:
    __slots__ = ("store", "cls", "data", "holders")

    def __init__(self, store: "CellStore", cls: int):
        self.store = store
        self.cls = cls
        self.data = torch.empty(1 << cls)
        self.holders = 0

    def as_tensor(self, *shape: int) -> torch.Tensor:
        n = 1
        for s in shape:
            n *= s
        return self.data[:n].view(shape)

    def hold(self) -> "Cell":
        self.holders += 1
        return self

    def unhold(self) -> None:
        self.holders -= 1
        if self.holders == 0:
            self.store._idle[self.cls].append(self)


class CellStore:
    def __init__(self, max_cls: int = 26, parent: Optional["CellStore"] = None):
        self.max_cls = max_cls
        self.parent = parent
        self._idle: Dict[int, List[Cell]] = {c: [] for c in range(max_cls + 1)}

    def cell(self, n: int) -> Cell:
        cls = max(6, (n - 1).bit_length())
        if cls > self.max_cls:
            if self.parent is None:
                raise ValueError(f"{n} elements are over the largest class")
            return self.parent.cell(n)  # clean: returned to the caller, the cell knows its own store
        shelf = self._idle[cls]
        c = shelf.pop() if shelf else Cell(self, cls)
        return c.hold()  # clean: returned to the caller

    def cell_like(self, t: torch.Tensor) -> Cell:
        c = self.cell(t.numel())  # clean: returned to the caller
        c.as_tensor(*t.shape).copy_(t)
        return c

    def zeroed(self, n: int, limit: Optional[int] = None) -> Optional[Cell]:
        c = self.cell(n)  # leak: a cell over the limit is refused with its hold
        if limit is not None and c.data.numel() > limit:
            return None
        c.data.zero_()
        return c
