"""Fixed size block pool backed by one tensor."""
from __future__ import annotations

import threading
from dataclasses import dataclass

import torch


class PoolExhausted(Exception):
    """Raised when no block is available."""


@dataclass
class BlockHandle:
    index: int
    view: torch.Tensor
    owner: str = ""


class BlockPool:
    def __init__(self, count: int, block_bytes: int) -> None:
        self._data = torch.zeros(count, block_bytes, dtype=torch.uint8)
        self._bitmap = [False] * count
        self._mu = threading.Lock()

    def allocate(self, owner: str = "") -> BlockHandle:
        self._mu.acquire()  # clean: released in the finally, also when the pool is exhausted
        try:
            for i, used in enumerate(self._bitmap):
                if not used:
                    self._bitmap[i] = True
                    return BlockHandle(i, self._data[i], owner)
            raise PoolExhausted(owner)
        finally:
            self._mu.release()

    def allocate_many(self, n: int, owner: str = "") -> list[BlockHandle]:
        got: list[BlockHandle] = []
        try:
            for _ in range(n):
                got.append(self.allocate(owner))  # clean: near miss, rolled back before the exception goes on
        except PoolExhausted:
            self.free_many(got)
            raise
        return got

    def free(self, block: BlockHandle) -> None:
        with self._mu:
            self._bitmap[block.index] = False

    def free_many(self, blocks: list[BlockHandle]) -> None:
        for b in blocks:
            self.free(b)

    def utilisation(self) -> float:
        self._mu.acquire()  # leak: the empty pool returns with the mutex held
        if not self._bitmap:
            return 0.0
        u = sum(self._bitmap) / len(self._bitmap)
        self._mu.release()
        return u
