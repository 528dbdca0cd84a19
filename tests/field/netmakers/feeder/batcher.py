"""Packs documents into rows."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Iterable, Iterator

import torch

from .arena import Arena, RowLease


@dataclass
class PackedBatch:
    rows: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


class Packer:
    def __init__(self, arena: Arena, batch_rows: int, eos: int) -> None:
        self.arena = arena
        self.batch_rows = batch_rows
        self.eos = eos

    def _write(self, row: int, at: int, doc: list[int]) -> int:
        n = min(len(doc), self.arena.width - at)
        self.arena.tokens[row, at:at + n] = torch.tensor(doc[:n], dtype=torch.int32)
        return at + n

    def release(self, batch: PackedBatch) -> None:
        for r in batch.rows:
            self.arena.yield_back(r)
        batch.rows.clear()
        batch.lengths.clear()

    def pack(self, docs: Iterable[list[int]]) -> Iterator[PackedBatch]:
        """The consumer owns the rows of a batch and calls release()."""
        batch = PackedBatch()
        for doc in docs:
            row = self.arena.allot()  # clean: moved into the batch, the short last batch is released below
            batch.rows.append(row)
            batch.lengths.append(self._write(row, 0, doc))
            if len(batch.rows) == self.batch_rows:
                yield batch
                batch = PackedBatch()
        self.release(batch)

    def pack_greedy(self, docs: Iterable[list[int]]) -> PackedBatch | None:
        """One batch of rows with several documents each; None when they are too few."""
        batch = PackedBatch()
        row, at = -1, 0
        for doc in docs:
            if row < 0:
                row, at = self.arena.allot(), 0  # leak: a row in the making is left behind when the documents run out
            at = self._write(row, at, [*doc, self.eos])
            if at < self.arena.width:
                continue
            batch.rows.append(row)
            batch.lengths.append(at)
            row = -1
            if len(batch.rows) == self.batch_rows:
                return batch
        self.release(batch)
        return None

    def pack_one(self, doc: list[int], min_len: int) -> int | None:
        with RowLease(self.arena) as lease:  # clean: near miss, detached for the caller or closed by the with
            at = self._write(lease.row, 0, doc)
            if at < min_len:
                return None
            return lease.detach()

    def validate(self, doc: list[int]) -> bool:
        row = self.pack_one(doc, 1)  # leak: the detached row is not given back when the content matches
        if row is None:
            return False
        same = self.arena.tokens[row, : len(doc)].tolist() == doc[: self.arena.width]
        if not same:
            self.arena.yield_back(row)
        return same
