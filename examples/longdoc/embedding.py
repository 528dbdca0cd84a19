"""Token embeddings and rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .memory_pool import TensorMemoryPool, get_memory_pool


class RotaryTable:
    """Cosines and sines for every position, computed once in pooled memory."""

    def __init__(self, pool: TensorMemoryPool, length: int, dim: int) -> None:
        self.length = length
        self.table = pool.allocate((2, length, dim // 2))
        angles = torch.outer(torch.arange(length), 10_000 ** (-torch.arange(0, dim, 2) / dim))
        torch.cos(angles, out=self.table[0])
        torch.sin(angles, out=self.table[1])

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate pairs of features of `x`, shaped (b, n, e), by their position."""
        n = x.shape[1]
        cos, sin = self.table[0, :n], self.table[1, :n]
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class DecayTable:
    """Distance penalties in pooled memory; grows with the longest document seen."""

    def __init__(self, pool: TensorMemoryPool, rate: float) -> None:
        self._memory_pool = pool
        self._rate = rate
        self._table: Tensor | None = None

    def upto(self, length: int) -> Tensor:
        if self._table is not None and len(self._table) >= length:
            return self._table[:length, :length]
        self.close()
        self._table = self._memory_pool.allocate((length, length))
        distance = torch.arange(length)
        torch.mul((distance[:, None] - distance).abs(), -self._rate, out=self._table)
        return self._table

    def close(self) -> None:
        if self._table is not None:
            self._memory_pool.deallocate(self._table)
            self._table = None


class DocumentEmbedding(nn.Module):
    """Token embeddings with rotary positions mixed in."""

    def __init__(
        self, vocabulary: int, dim: int, max_length: int, pool: TensorMemoryPool | None = None
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = RotaryTable(pool or get_memory_pool(), max_length, dim)

    def forward(self, ids: Tensor) -> Tensor:
        return self.positions.rotate(self.tokens(ids))
