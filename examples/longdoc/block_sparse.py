"""Block-sparse attention: each block of tokens looks at its neighbours and at the first block."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BlockSparseAttention(nn.Module):
    """Scores of the chosen blocks are filled into a dense table; the rest stays at minus infinity."""

    def __init__(self, block_size: int = 32, reach: int = 1) -> None:
        super().__init__()
        self.block_size = block_size
        self.reach = reach

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, n, h, d = q.shape
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = torch.full((b, h, n, n), float("-inf"), dtype=q.dtype, device=q.device)
        blocks = -(-n // self.block_size)
        for row in range(blocks):
            rows = self._tokens(row, n)
            for column in self._visible(row, blocks):
                columns = self._tokens(column, n)
                scores[:, :, rows, columns] = q[:, :, rows] @ k[:, :, columns].transpose(-1, -2) * d**-0.5
        return (scores.softmax(-1) @ v).transpose(1, 2)

    def _tokens(self, block: int, n: int) -> slice:
        return slice(block * self.block_size, min((block + 1) * self.block_size, n))

    def _visible(self, row: int, blocks: int) -> list[int]:
        near = range(max(0, row - self.reach), min(blocks, row + self.reach + 1))
        return sorted({0, *near})
