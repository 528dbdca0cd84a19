"""Dilated attention: segments of several lengths, and of each every r-th token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .memory_pool import TensorMemoryPool, get_memory_pool
from .pooling import MemoryPoolMixin
from .scratch import borrow_causal_mask


class DilatedAttention(MemoryPoolMixin, nn.Module):
    """Branches with their own segment length and dilation, mixed with equal weight where they overlap."""

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        enable_memory_pool: bool = False,
        pool: TensorMemoryPool | None = None,
    ) -> None:
        super().__init__()
        if len(segment_lengths) != len(dilation_rates):
            raise ValueError(
                f"{len(segment_lengths)} segment lengths, but {len(dilation_rates)} dilation rates"
            )
        self._init_memory_pool(enable_memory_pool, pool)
        self.branches = list(zip(segment_lengths, dilation_rates, strict=True))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        b, n, h, d = q.shape
        with (
            self._lease_tensor((b, n, h, d), q.dtype, zero=True) as mixed,
            self._lease_tensor((b, n, h, 1), q.dtype, zero=True) as weight,
        ):
            for segment, dilation in self.branches:
                self._add_branch(mixed, weight, (q, k, v), segment, dilation, is_causal)
            return mixed / weight.clamp_min(1.0)

    def _add_branch(
        self,
        mixed: Tensor,
        weight: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        segment: int,
        dilation: int,
        is_causal: bool,
    ) -> None:
        b, n, h, d = qkv[0].shape
        for start in range(0, n, segment):
            picked = slice(start, min(start + segment, n), dilation)
            q, k, v = (x[:, picked].transpose(1, 2) for x in qkv)
            m = q.shape[2]
            scores = self._allocate_tensor((b, h, m, m), q.dtype)
            weight[:, picked] += 1.0
            if m == 1:
                mixed[:, picked] += v.transpose(1, 2)
                continue
            torch.matmul(q, k.transpose(-1, -2), out=scores)
            scores.mul_(d**-0.5)
            if is_causal:
                scores.masked_fill_(torch.ones(m, m, dtype=torch.bool).triu(1), float("-inf"))
            mixed[:, picked] += (scores.softmax(-1) @ v).transpose(1, 2)
            self._deallocate_tensor(scores)


class WindowAttention(MemoryPoolMixin, nn.Module):
    """Plain attention in windows that do not overlap."""

    def __init__(
        self, window: int, *, enable_memory_pool: bool = False, pool: TensorMemoryPool | None = None
    ) -> None:
        super().__init__()
        self._init_memory_pool(enable_memory_pool, pool)
        self.window = window

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        b, n, h, d = q.shape
        out = torch.empty_like(q)
        pool = self._pool or get_memory_pool()
        mask = borrow_causal_mask(pool, self.window) if is_causal else None
        try:
            for start in range(0, n, self.window):
                stop = min(start + self.window, n)
                out[:, start:stop] = self._window(q[:, start:stop], k[:, start:stop], v[:, start:stop], mask)
        finally:
            if mask is not None:
                pool.deallocate(mask)
        return out

    def _window(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        b, w, h, d = q.shape
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        scores = self._allocate_tensor((b, h, w, w), q.dtype)
        try:
            if w == 0:
                return v.transpose(1, 2)
            torch.matmul(q, k.transpose(-1, -2), out=scores)
            scores.mul_(d**-0.5)
            if mask is not None:
                scores.masked_fill_(mask[:w, :w], float("-inf"))
            return (scores.softmax(-1) @ v).transpose(1, 2)
        finally:
            self._deallocate_tensor(scores)
