from __future__ import annotations

import threading
from dataclasses import dataclass

import torch


@dataclass(eq=False)
class Block:
    data: torch.Tensor
    rows: int = 0
    generation: int = 0


class BlockPool:
    """Fixed number of equally sized blocks, made lazily."""

    def __init__(self, count: int, rows: int, width: int) -> None:
        self.rows = rows
        self.width = width
        self._spare: list[Block] = []
        self._unmade = count
        self._lock = threading.Lock()
        self.generation = 0

    def fetch_block(self) -> Block | None:
        with self._lock:
            if self._spare:
                return self._spare.pop()  # clean: returned to the caller
            if self._unmade == 0:
                return None
            self._unmade -= 1
        return Block(torch.empty(self.rows, self.width), generation=self.generation)

    def return_block(self, block: Block) -> None:
        block.rows = 0
        with self._lock:
            self._spare.append(block)

    def bump(self) -> None:
        """Blocks of an older generation are replaced after a schema change."""
        with self._lock:
            self.generation += 1
            keep = []
            while self._spare:
                b = self._spare.pop()  # clean: an old block is traded for the right to make a new one
                if b.generation == self.generation:
                    keep.append(b)
                else:
                    self._unmade += 1
            self._spare = keep
