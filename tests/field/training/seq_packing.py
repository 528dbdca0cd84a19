"""Greedy sequence packing: documents are packed into fixed rows taken from a row table."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Generator, Iterable, List, Optional, Sequence, Tuple

import torch


@dataclass
class Row:
    index: int
    used: int = 0
    docs: List[Tuple[int, int]] = field(default_factory=list)


class RowTable:
    def __init__(self, n_rows: int, width: int, pad_id: int = 0):
        self.tokens = torch.full((n_rows, width), pad_id, dtype=torch.long)
        self.width = width
        self.pad_id = pad_id
        self._open = set(range(n_rows))

    def open_row(self) -> Optional[Row]:
        if not self._open:
            return None
        return Row(self._open.pop())

    def close_row(self, row: Row) -> None:
        self.tokens[row.index].fill_(self.pad_id)
        self._open.add(row.index)


class Packer:
    def __init__(self, table: RowTable, max_open: int = 4):
        self.table = table
        self.max_open = max_open
        self.rows: List[Row] = []
        self.spill: Dict[int, Row] = {}

    def _place(self, row: Row, doc: Sequence[int]) -> None:
        n = len(doc)
        self.table.tokens[row.index, row.used : row.used + n] = torch.as_tensor(doc)
        row.docs.append((row.used, row.used + n))
        row.used += n

    def add(self, doc: Sequence[int]) -> bool:
        for row in self.rows:
            if row.used + len(doc) <= self.table.width:
                self._place(row, doc)
                return True
        row = self.table.open_row()  # leak: a document longer than the row gets False while the row stays open
        if row is None:
            return False
        if len(doc) > self.table.width:
            return False
        self._place(row, doc)
        self.rows.append(row)
        return True

    def add_checked(self, doc: Sequence[int]) -> bool:
        if len(doc) > self.table.width:
            return False
        row = self.table.open_row()  # clean: near miss, the length test is before; flush() closes the row
        if row is None:
            return False
        self._place(row, doc)
        self.rows.append(row)
        return True

    def flush(self) -> List[torch.Tensor]:
        out = []
        for row in self.rows:
            out.append(self.table.tokens[row.index, : row.used].clone())
            self.table.close_row(row)
        self.rows = []
        return out

    def add_spill(self, key: int, doc: Sequence[int]) -> bool:
        row = self.table.open_row()  # leak: an older row under the same key is overwritten
        if row is None:
            return False
        self._place(row, doc)
        self.spill[key] = row
        return True

    def spill_by_length(self, docs: Iterable[Sequence[int]]) -> int:
        return sum(self.add_spill(len(d) // 64, d) for d in docs)

    def flush_spill(self) -> None:
        for key in list(self.spill):
            self.table.close_row(self.spill.pop(key))

    def pack_one(self, docs: Iterable[Sequence[int]]) -> Optional[torch.Tensor]:
        row = self.table.open_row()  # clean: near miss, break only leaves the loop, the row is closed after it
        if row is None:
            return None
        for doc in docs:
            if row.used + len(doc) > self.table.width:
                break
            self._place(row, doc)
        out = self.table.tokens[row.index, : row.used].clone()
        self.table.close_row(row)
        return out

    def pack_exact(self, docs: Iterable[Sequence[int]], length: int) -> Optional[torch.Tensor]:
        row = self.table.open_row()  # leak: return None inside the loop leaves the row open
        if row is None:
            return None
        for doc in docs:
            if row.used + len(doc) > length:
                return None
            self._place(row, doc)
        out = self.table.tokens[row.index, :length].clone()
        self.table.close_row(row)
        return out

    def stream(self, docs: Iterable[Sequence[int]]) -> Generator[torch.Tensor, None, None]:
        row = self.table.open_row()  # leak: the row is exchanged when it is full and the old one is not closed
        for doc in docs:
            if row.used + len(doc) > self.table.width:
                yield self.table.tokens[row.index, : row.used].clone()
                row = self.table.open_row()  # leak: exchanged in turn for the next row
            self._place(row, doc)
        yield self.table.tokens[row.index, : row.used].clone()
        self.table.close_row(row)

    def stream_tidy(self, docs: Iterable[Sequence[int]]) -> Generator[torch.Tensor, None, None]:
        row = self.table.open_row()  # clean: near miss, closed before the exchange and at the end
        try:
            for doc in docs:
                if row.used + len(doc) > self.table.width:
                    yield self.table.tokens[row.index, : row.used].clone()
                    self.table.close_row(row)
                    row = None
                    row = self.table.open_row()  # clean: the finally closes the last one
                self._place(row, doc)
            yield self.table.tokens[row.index, : row.used].clone()
        finally:
            if row is not None:
                self.table.close_row(row)


def reopen_rows(table: RowTable, n: int) -> List[Row]:
    rows: List[Row] = []
    while len(rows) < n:
        row = table.open_row()  # clean: near miss, a partial set is closed before the empty return
        if row is None:
            for r in rows:
                table.close_row(r)
            return []
        rows.append(row)
    return rows


def pack_groups(table: RowTable, groups: Sequence[Sequence[Sequence[int]]]) -> int:
    rows = reopen_rows(table, len(groups))  # leak: empty groups are skipped and their rows never closed
    packed = 0
    for row, group in zip(rows, groups):
        if not group:
            continue
        for doc in group:
            row.used += len(doc)
            packed += 1
        table.close_row(row)
    return packed


def mean_fill(table: RowTable, lengths: Sequence[int]) -> float:
    rows = reopen_rows(table, len(lengths))  # clean: all rows closed in the loop
    total = 0
    for row, n in zip(rows, lengths):
        total += min(n, table.width)
        table.close_row(row)
    return total / max(len(lengths), 1)
