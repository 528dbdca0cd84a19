"""Multi-head attention with several patterns side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .dilated import DilatedAttention, WindowAttention
from .memory_pool import TensorMemoryPool
from .pooling import MemoryPoolMixin


class MultiheadLongAttention(MemoryPoolMixin, nn.Module):
    """Projections around a dilated and a window pattern whose results are averaged."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        window: int = 64,
        enable_memory_pool: bool = False,
        pool: TensorMemoryPool | None = None,
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        self._init_memory_pool(enable_memory_pool, pool)
        self.num_heads = num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.out = nn.Linear(embed_dim, embed_dim)
        switches = {"enable_memory_pool": enable_memory_pool, "pool": pool}
        self.patterns = nn.ModuleList(
            [
                DilatedAttention(segment_lengths, dilation_rates, **switches),
                WindowAttention(window, **switches),
            ]
        )

    def forward(self, x: Tensor, is_causal: bool = False) -> Tensor:
        b, n, e = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.num_heads, -1).unbind(2)
        total = self._allocate_tensor((b, n, e), x.dtype, zero=True)
        for pattern in self.patterns:
            total += pattern(q, k, v, is_causal).reshape(b, n, e)
        total = total / len(self.patterns)
        projected = self.out(total)
        self._deallocate_tensor(total)
        return projected

    def attention_map(self, x: Tensor, head: int) -> Tensor:
        """Full attention of one head, for plots; quadratic in the length."""
        b, n, e = x.shape
        q, k, _ = self.qkv(x).view(b, n, 3, self.num_heads, -1).unbind(2)
        scores = self._allocate_tensor((b, n, n), x.dtype)
        try:
            torch.matmul(q[:, :, head], k[:, :, head].transpose(-1, -2), out=scores)
            scores = scores.mul_((e // self.num_heads) ** -0.5)
            return scores.softmax(-1)
        finally:
            self._deallocate_tensor(scores)
