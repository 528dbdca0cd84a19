"""Scratch tensors for the embedding shards; a thin pool over a thin pool."""
from __future__ import annotations

from typing import Callable, Dict, List, Optional, Tuple

import torch


class ScratchArena:
    def __init__(self, rows: int, dim: int, depth: int) -> None:
        self.shape: Tuple[int, int] = (rows, dim)
        self.stack: List[torch.Tensor] = [torch.zeros(rows, dim) for _ in range(depth)]

    def take(self) -> Optional[torch.Tensor]:
        if not self.stack:
            return None
        return self.stack.pop()  # clean: pool body, returned to the caller

    def take_zeroed(self, rows: int) -> Optional[torch.Tensor]:
        if not self.stack:
            return None
        block = self.stack.pop()  # leak: a narrow block is replaced by a fresh tensor and forgotten
        if block.shape[0] < rows:
            block = torch.zeros(rows, self.shape[1])
        return block.zero_()

    def put_back(self, block: torch.Tensor) -> None:
        self.stack.append(block)

    def trim(self, keep: int) -> int:
        dropped = 0
        while len(self.stack) > keep:
            block = self.stack.pop()  # clean: near miss, shrinking the pool for good, the storage is given back to the system
            block.untyped_storage().resize_(0)
            dropped += 1
        return dropped


class TableArenas:
    """One arena for each table; forwards to it."""

    def __init__(self, arenas: Dict[str, ScratchArena]) -> None:
        self.arenas = arenas

    def take(self, table: str) -> Optional[torch.Tensor]:
        return self.arenas[table].take()  # clean: wrapper hands the block to its caller

    def put_back(self, table: str, block: torch.Tensor) -> None:
        self.arenas[table].put_back(block)

    def with_block(self, table: str, fn: Callable[[torch.Tensor], torch.Tensor]) -> Optional[torch.Tensor]:
        block = self.take(table)  # clean: put back in finally after the callback
        if block is None:
            return None
        try:
            return fn(block).clone()
        finally:
            self.put_back(table, block)
