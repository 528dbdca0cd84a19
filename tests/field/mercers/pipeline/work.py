"""Units of work which travel down the pipeline with what they hold."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Optional

from .ring import ActivationRing, Cell, MicrobatchTable


@dataclass(eq=False)
class WorkItem:
    mb: int
    cell: Cell
    ring: ActivationRing
    table: MicrobatchTable
    tokens: List[int] = field(default_factory=list)
    extra: Optional[Cell] = None

    def dispose(self) -> None:
        self.ring.retire(self.cell)
        if self.extra is not None:
            self.ring.retire(self.extra)
            self.extra = None
        self.table.retire_number(self.mb)


def make_item(table: MicrobatchTable, ring: ActivationRing, tokens: List[int]) -> Optional[WorkItem]:
    mb = table.assign()  # leak: the return for lack of a cell keeps the number
    if mb < 0:
        return None
    cell = ring.produce()  # clean: handed to the caller in the item
    if cell is None:
        return None
    return WorkItem(mb, cell, ring, table, tokens)


def make_wide_item(table: MicrobatchTable, ring: ActivationRing, tokens: List[int]) -> Optional[WorkItem]:
    """An item with a second cell for the residual stream."""
    mb = table.assign()  # clean: retired on both failures, else in the item
    if mb < 0:
        return None
    cell = ring.produce()  # clean: retired when the second is missing, else in the item
    if cell is None:
        table.retire_number(mb)
        return None
    extra = ring.produce()  # clean: in the item
    if extra is None:
        ring.retire(cell)
        table.retire_number(mb)
        return None
    return WorkItem(mb, cell, ring, table, tokens, extra)
