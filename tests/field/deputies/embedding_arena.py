"""Row arena for sharded embedding tables with cold-row spill, in the manner of a managed-collision module."""
from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass
class Span:
    start: int
    rows: int


class Arena:
    """First-fit allocator over rows of one weight tensor."""

    def __init__(self, rows: int, dim: int) -> None:
        self.weight = torch.zeros(rows, dim)
        self.holes: list[Span] = [Span(0, rows)]

    def alloc(self, rows: int) -> Span | None:
        for i, hole in enumerate(self.holes):
            if hole.rows >= rows:
                span = Span(hole.start, rows)
                if hole.rows == rows:
                    self.holes.pop(i)  # clean: near miss, the hole is used up whole by the span that goes out
                else:
                    self.holes[i] = Span(hole.start + rows, hole.rows - rows)
                return span
        return None

    def alloc_best(self, rows: int, align: int) -> Span | None:
        fits = [h for h in self.holes if h.rows >= rows + (-h.start) % align]
        if not fits:
            return None
        hole = min(fits, key=lambda h: h.rows)
        self.holes.remove(hole)  # leak: the padding in front of the aligned start is put back nowhere
        start = hole.start + (-hole.start) % align
        tail = hole.start + hole.rows - (start + rows)
        if tail:
            self.holes.append(Span(start + rows, tail))
        return Span(start, rows)

    def free(self, span: Span) -> None:
        self.holes.append(span)
        self.holes.sort(key=lambda s: s.start)
        merged: list[Span] = []
        for s in self.holes:
            if merged and merged[-1].start + merged[-1].rows == s.start:
                merged[-1] = Span(merged[-1].start, merged[-1].rows + s.rows)
            else:
                merged.append(s)
        self.holes = merged

    def view(self, span: Span) -> torch.Tensor:
        return self.weight[span.start : span.start + span.rows]


class SpillFile:
    """Fixed-size records in a memory-mapped file."""

    def __init__(self, path: Path, records: int, size: int) -> None:
        self.size = size
        fd = os.open(path, os.O_RDWR | os.O_CREAT)  # clean: near miss, the map has its own duplicate, so fd is closed at once
        try:
            os.ftruncate(fd, records * size)
            self.map = mmap.mmap(fd, records * size)  # clean: closed by close()
        finally:
            os.close(fd)
        self.free_records = list(range(records))

    def take(self) -> int | None:
        return self.free_records.pop() if self.free_records else None

    def give(self, rec: int) -> None:
        self.free_records.append(rec)

    def write(self, rec: int, data: bytes) -> bool:
        if len(data) > self.size:
            return False
        self.map[rec * self.size : rec * self.size + len(data)] = data
        return True

    def read(self, rec: int, n: int) -> bytes:
        return self.map[rec * self.size : rec * self.size + n]

    def close(self) -> None:
        self.map.close()


@dataclass
class Table:
    name: str
    span: Span
    optim: Span | None = None
    cold: dict[int, int] = field(default_factory=dict)


class TableStore:
    def __init__(self, arena: Arena, spill: SpillFile) -> None:
        self.arena = arena
        self.spill = spill
        self.tables: OrderedDict[str, Table] = OrderedDict()

    def create(self, name: str, rows: int, with_optim: bool) -> Table | None:
        if name in self.tables:
            return self.tables[name]
        span = self.arena.alloc(rows)  # leak: lost when the optimizer rows do not fit
        if span is None:
            return None
        table = Table(name, span)
        if with_optim:
            table.optim = self.arena.alloc(rows)  # clean: near miss, drop() frees it with the table
            if table.optim is None:
                return None
        self.tables[name] = table
        return table

    def create_many(self, sizes: dict[str, int]) -> bool:
        made: list[Table] = []
        for name, rows in sizes.items():
            span = self.arena.alloc(rows)  # clean: near miss, when one does not fit all the earlier ones are freed
            if span is None:
                for t in made:
                    self.arena.free(t.span)
                return False
            made.append(Table(name, span))
        for t in made:
            if t.name in self.tables:
                self.drop(t.name)
            self.tables[t.name] = t
        return True

    def grow(self, name: str, rows: int) -> bool:
        t = self.tables[name]
        bigger = self.arena.alloc(rows)  # leak: the smaller span in t.span is overwritten and not freed
        if bigger is None:
            return False
        self.arena.view(bigger)[: t.span.rows] = self.arena.view(t.span)
        t.span = bigger
        return True

    def compact(self, name: str, keep: torch.Tensor) -> bool:
        t = self.tables[name]
        smaller = self.arena.alloc_best(int(keep.numel()), 8)  # clean: near miss, takes the place of the old span, which is freed first
        if smaller is None:
            return False
        self.arena.view(smaller).copy_(self.arena.view(t.span)[keep])
        self.arena.free(t.span)
        t.span = smaller
        return True

    def spill_row(self, name: str, row: int) -> bool:
        t = self.tables[name]
        if row in t.cold:
            return True
        rec = self.spill.take()  # leak: a row too long for a record returns False with the record taken
        if rec is None:
            return False
        if not self.spill.write(rec, self.arena.view(t.span)[row].numpy().tobytes()):
            return False
        t.cold[row] = rec
        return True

    def respill(self, name: str, row: int) -> bool:
        """Write a row to a new record, so that readers of the old one are not disturbed."""
        t = self.tables[name]
        rec = self.spill.take()  # clean: near miss, given back if the write is refused, and the old record is given back when replaced
        if rec is None:
            return False
        if not self.spill.write(rec, self.arena.view(t.span)[row].numpy().tobytes()):
            self.spill.give(rec)
            return False
        old = t.cold.get(row)
        if old is not None:
            self.spill.give(old)
        t.cold[row] = rec
        return True

    def restore_row(self, name: str, row: int) -> None:
        t = self.tables[name]
        rec = t.cold.pop(row)
        width = self.arena.weight.shape[1] * 4
        data = bytearray(self.spill.read(rec, width))
        self.arena.view(t.span)[row] = torch.frombuffer(data, dtype=torch.float32)
        self.spill.give(rec)

    def lookup(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        t = self.tables[name]
        for row in ids.unique().tolist():
            if row in t.cold:
                self.restore_row(name, row)
        return self.arena.view(t.span)[ids]

    def dedup_sum(self, name: str, ids: torch.Tensor, grads: torch.Tensor) -> torch.Tensor | None:
        uniq, inv = ids.unique(return_inverse=True)
        tmp = self.arena.alloc(int(uniq.numel()))  # leak: a clone of the rows is returned and the span itself dropped
        if tmp is None:
            return None
        rows = self.arena.view(tmp)
        rows.zero_()
        rows.index_add_(0, inv, grads)
        return rows.clone()

    def drop(self, name: str) -> None:
        t = self.tables.pop(name)
        self.arena.free(t.span)
        if t.optim is not None:
            self.arena.free(t.optim)
        for rec in t.cold.values():
            self.spill.give(rec)

    def close(self) -> None:
        for name in list(self.tables):
            self.drop(name)
        self.spill.close()
