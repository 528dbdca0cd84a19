"""Rows of the request-to-token table and KV token indices."""
from __future__ import annotations

from typing import List, Optional, Sequence


class Row:
    __slots__ = ("index", "length")

    def __init__(self, index: int) -> None:
        self.index = index
        self.length = 0


class RowTable:
    def __init__(self, size: int) -> None:
        self._free: List[Row] = [Row(i) for i in range(size)]
        self.size = size

    def available(self) -> int:
        return len(self._free)

    def claim(self) -> Optional[Row]:
        if not self._free:
            return None
        row = self._free.pop()
        row.length = 0
        return row

    def claim_or_raise(self) -> Row:
        row = self.claim()  # clean: near miss, None raises, else handed to the caller
        if row is None:
            raise MemoryError("no free request row")
        return row

    def surrender(self, row: Row) -> None:
        self._free.append(row)


class TokenPool:
    """Flat KV slots by token index."""

    def __init__(self, size: int) -> None:
        self._free: List[int] = list(range(size))

    def alloc(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        out, self._free = self._free[:n], self._free[n:]
        return out

    def free(self, indices: Sequence[int]) -> None:
        self._free.extend(indices)
