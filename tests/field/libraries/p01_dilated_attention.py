"""Dilated attention with an optional shared tensor pool for its accumulators."""
from __future__ import annotations

import math
import threading
from collections import defaultdict
from typing import Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

Key = Tuple[Tuple[int, ...], torch.dtype]


class TensorMemoryPool:
    """Free lists of tensors, one list per (shape, dtype)."""

    def __init__(self, device: torch.device, max_per_bucket: int = 8) -> None:
        self.device = device
        self.max_per_bucket = max_per_bucket
        self._free: Dict[Key, List[Tensor]] = defaultdict(list)
        self._in_use: Dict[int, Key] = {}
        self._mutex = threading.Lock()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        key = (tuple(shape), dtype)
        with self._mutex:
            bucket = self._free[key]
            if bucket:
                buf = bucket.pop()  # clean: handed to the caller
            else:
                buf = torch.empty(key[0], dtype=dtype, device=self.device)
            self._in_use[buf.data_ptr()] = key
        return buf

    def deallocate(self, buf: Tensor) -> None:
        with self._mutex:
            key = self._in_use.pop(buf.data_ptr(), None)
            if key is None:
                return
            bucket = self._free[key]
            if len(bucket) < self.max_per_bucket:
                bucket.append(buf.view(key[0]))

    def outstanding(self) -> int:
        with self._mutex:
            return len(self._in_use)


class PooledModuleMixin:
    memory_pool: Optional[TensorMemoryPool] = None

    def enable_memory_pool(self, pool: TensorMemoryPool) -> None:
        self.memory_pool = pool

    def _take(self, shape: Sequence[int], like: Tensor) -> Tensor:
        if self.memory_pool is not None:
            return self.memory_pool.allocate(shape, like.dtype)  # clean: handed to the caller
        return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)

    def _drop(self, buf: Tensor) -> None:
        if self.memory_pool is not None:
            self.memory_pool.deallocate(buf)


class DilatedAttention(PooledModuleMixin, nn.Module):
    def __init__(self, segments: Sequence[int], rates: Sequence[int]) -> None:
        super().__init__()
        if len(segments) != len(rates):
            raise ValueError("segments and rates must have the same length")
        self.segments = list(segments)
        self.rates = list(rates)

    def _attend_group(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, seg: int, rate: int) -> None:
        b, n, h, d = q.shape
        for start in range(0, n, seg):
            idx = torch.arange(start, min(start + seg, n), rate, device=q.device)
            if idx.numel() < 2:
                continue
            qs, ks, vs = (t.index_select(1, idx).transpose(1, 2) for t in (q, k, v))
            scores = self._take((b, h, idx.numel(), idx.numel()), q)  # clean: dropped at the end of the iteration
            torch.matmul(qs, ks.transpose(-1, -2), out=scores)
            scores.mul_(1.0 / math.sqrt(d))
            probs = torch.softmax(scores, dim=-1)
            out.index_add_(1, idx, torch.matmul(probs, vs).transpose(1, 2))
            self._drop(scores)

    def _group_weights(self, q: Tensor) -> Tensor:
        weights = self._take((len(self.segments),), q)  # leak: softmax gives a new tensor and the pooled one is rebound
        for i, seg in enumerate(self.segments):
            weights[i] = math.log1p(seg)
        weights = torch.softmax(weights, dim=0)
        return weights

    @torch.no_grad()
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = self._take(q.shape, q)  # leak: the division rebinds out and the pooled tensor is lost
        out.zero_()
        for seg, rate in zip(self.segments, self.rates):
            self._attend_group(q, k, v, out, seg, rate)
        out = out / len(self.segments)
        return out

    @torch.no_grad()
    def forward_weighted(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = self._group_weights(q)
        total = self._take(q.shape, q)  # clean: near miss, the rebinding is to in-place results of the same tensor
        total.zero_()
        for i, (seg, rate) in enumerate(zip(self.segments, self.rates)):
            part = self._take(q.shape, q)  # clean: dropped in the same iteration
            part = part.zero_()
            self._attend_group(q, k, v, part, seg, rate)
            part = part.mul_(weights[i])
            total = total.add_(part)
            self._drop(part)
        result = total.clone()
        self._drop(total)
        return result


class MultiheadDilatedAttention(PooledModuleMixin, nn.Module):
    def __init__(self, dim: int, heads: int, segments: Sequence[int], rates: Sequence[int]) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.attn = DilatedAttention(segments, rates)

    def enable_memory_pool(self, pool: TensorMemoryPool) -> None:
        super().enable_memory_pool(pool)
        self.attn.enable_memory_pool(pool)

    def _pad(self, x: Tensor, multiple: int) -> Tuple[Tensor, int]:
        b, n, c = x.shape
        extra = (-n) % multiple
        if extra == 0:
            return x, 0
        padded = self._take((b, n + extra, c), x)  # clean: handed to the caller together with the pad length
        padded[:, :n].copy_(x)
        padded[:, n:].zero_()
        return padded, extra

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        padded, extra = self._pad(x, self.attn.segments[0])  # clean: near miss, extra tells whether the tensor is pooled
        q, k, v = self.qkv(padded).view(b, n + extra, 3, self.heads, -1).unbind(2)
        y = self.attn(q, k, v).reshape(b, n + extra, c)
        if extra:
            self._drop(padded)
        return self.proj(y[:, :n])

    def forward_chunked(self, x: Tensor, chunk: int) -> Tensor:
        outs: List[Tensor] = []
        for piece in x.split(chunk, dim=1):
            padded, extra = self._pad(piece, self.attn.segments[0])  # leak: the padded tensor is dropped unreturned when extra > 0
            b, n, c = padded.shape
            q, k, v = self.qkv(padded).view(b, n, 3, self.heads, -1).unbind(2)
            y = self.attn(q, k, v).reshape(b, n, c)
            outs.append(self.proj(y[:, : n - extra]))
        return torch.cat(outs, dim=1)

    @torch.no_grad()
    def head_means(self, y: Tensor) -> Tensor:
        b, n, _ = y.shape
        acc = self._take((b, n, self.heads), y)  # leak: in training mode the clone is returned before the drop
        acc.copy_(y.view(b, n, self.heads, -1).mean(-1))
        if self.training:
            return acc.clone()
        means = acc.mean(-1)
        self._drop(acc)
        return means
