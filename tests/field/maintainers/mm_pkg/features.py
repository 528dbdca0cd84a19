"""Rows of the shared feature tensor."""
from __future__ import annotations

from typing import List, Optional

import torch


class FeatureRows:
    def __init__(self, rows: int, dim: int):
        self.table = torch.zeros(rows, dim)
        self._unused = set(range(rows))

    def assign(self, n: int) -> Optional[List[int]]:
        if n > len(self._unused):
            return None
        return [self._unused.pop() for _ in range(n)]  # clean: the list of rows is the caller's

    def assign_contiguous(self, n: int) -> Optional[range]:
        for lo in range(self.table.shape[0] - n + 1):
            span = range(lo, lo + n)
            if all(r in self._unused for r in span):
                self._unused.difference_update(span)  # clean: near miss, taken only when all rows are free, then returned
                return span
        return None

    def assign_even(self) -> Optional[int]:
        """One row with an even number."""
        while self._unused:
            row = self._unused.pop()  # leak: odd rows are popped and forgotten
            if row % 2 == 0:
                return row
        return None

    def unassign(self, rows) -> None:
        self._unused.update(rows)
