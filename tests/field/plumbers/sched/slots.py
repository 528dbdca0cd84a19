"""Request rows of the persistent batch."""
from __future__ import annotations

from typing import List, Optional


class RowPool:
    """Rows in the input batch; a row keeps its index while its request runs."""

    def __init__(self, max_seqs: int) -> None:
        self._free: List[int] = list(range(max_seqs))
        self.owner: List[Optional[str]] = [None] * max_seqs

    def take(self, rid: str) -> Optional[int]:
        if not self._free:
            return None
        row = self._free.pop(0)
        self.owner[row] = rid
        return row

    def drop(self, row: int) -> None:
        self.owner[row] = None
        self._free.append(row)
        self._free.sort()

    def take_or_raise(self, rid: str) -> int:
        row = self.take(rid)  # clean: None raises, a row goes to the caller
        if row is None:
            raise RuntimeError("persistent batch is full")
        return row
