from __future__ import annotations

from collections import deque
from typing import Sequence

import torch

from .pool import Block, BlockPool


class Batcher:
    """Collects rows per table and emits full blocks."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.partial: dict[str, Block] = {}
        self.done: deque[tuple[str, Block]] = deque()

    def add(self, table: str, rows: torch.Tensor) -> bool:
        block = self.partial.get(table)
        if block is None:
            block = self.pool.fetch_block()  # clean: near miss, in partial or done, which clear() empties
            if block is None:
                return False
            self.partial[table] = block
        n = min(rows.shape[0], self.pool.rows - block.rows)
        block.data[block.rows : block.rows + n].copy_(rows[:n])
        block.rows += n
        if block.rows == self.pool.rows:
            self.done.append((table, self.partial.pop(table)))
        return n == rows.shape[0]

    def add_whole(self, table: str, rows: torch.Tensor) -> bool:
        """A block of its own for rows that must not be mixed."""
        block = self.pool.fetch_block()  # leak: not returned when the rows do not fit in one block
        if block is None:
            return False
        if rows.shape[0] > self.pool.rows:
            return False
        block.data[: rows.shape[0]].copy_(rows)
        block.rows = rows.shape[0]
        self.done.append((table, block))
        return True

    def next_full(self) -> tuple[str, Block] | None:
        return self.done.popleft() if self.done else None

    def clear(self) -> None:
        for block in self.partial.values():
            self.pool.return_block(block)
        self.partial.clear()
        while self.done:
            self.pool.return_block(self.done.pop()[1])


class Stitcher:
    """Puts the columns of several tables next to each other."""

    def __init__(self, pool: BlockPool, order: Sequence[str]) -> None:
        self.pool = pool
        self.order = list(order)
        self.sides: dict[str, Block] = {}

    def put(self, table: str, rows: torch.Tensor) -> None:
        if table not in self.order:
            raise KeyError(table)
        block = self.pool.fetch_block()  # leak: discard() pops a side without returning it
        if block is None:
            raise MemoryError("no feature block")
        block.rows = rows.shape[0]
        block.data[: block.rows].copy_(rows)
        old = self.sides.pop(table, None)
        if old is not None:
            self.pool.return_block(old)
        self.sides[table] = block

    def discard(self, table: str) -> bool:
        return self.sides.pop(table, None) is not None

    def stitch(self) -> torch.Tensor | None:
        if any(t not in self.sides for t in self.order):
            return None
        out = torch.cat([self.sides[t].data[: self.sides[t].rows] for t in self.order], 1)
        for t in self.order:
            self.pool.return_block(self.sides.pop(t))
        return out
