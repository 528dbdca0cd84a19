"""Memory-pool mixin shared by the attention modules."""
from __future__ import annotations

import math
import threading
from collections import defaultdict
from typing import Dict, List, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F

PoolKey = Tuple[Tuple[int, ...], torch.dtype, str]


class TensorPool:
    """Caches tensors by (shape, dtype, device)."""

    def __init__(self, max_per_key: int = 8) -> None:
        self._free: Dict[PoolKey, List[torch.Tensor]] = defaultdict(list)
        self._in_use: Dict[int, PoolKey] = {}
        self._max_per_key = max_per_key
        self._lock = threading.Lock()
        self.hits = 0
        self.misses = 0

    def get(self, shape, dtype: torch.dtype, device) -> torch.Tensor:
        key = (tuple(shape), dtype, str(device))
        with self._lock:  # clean: with block
            bucket = self._free[key]
            if bucket:
                t = bucket.pop()  # clean: recorded in _in_use and returned
                self.hits += 1
            else:
                t = torch.empty(shape, dtype=dtype, device=device)
                self.misses += 1
            self._in_use[id(t)] = key
            return t

    def put(self, t: Optional[torch.Tensor]) -> None:
        if t is None:
            return
        with self._lock:  # clean: with block
            key = self._in_use.pop(id(t), None)
            if key is None:
                return
            bucket = self._free[key]
            if len(bucket) < self._max_per_key:
                bucket.append(t)


class PooledAttentionMixin:
    pool: Optional[TensorPool]

    def init_pool(self, pool: Optional[TensorPool]) -> None:
        self.pool = pool

    def _take(self, shape, like: torch.Tensor) -> torch.Tensor:
        if self.pool is None:
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        return self.pool.get(shape, like.dtype, like.device)  # clean: handed to the caller

    def _give(self, t: Optional[torch.Tensor]) -> None:
        if self.pool is not None:
            self.pool.put(t)


class ScaledDotAttention(nn.Module, PooledAttentionMixin):
    def __init__(self, head_dim: int, pool: Optional[TensorPool] = None) -> None:
        super().__init__()
        self.init_pool(pool)
        self.scale = 1.0 / math.sqrt(head_dim)

    def forward(self, q, k, v, mask: Optional[torch.Tensor] = None):
        b, h, n, _ = q.shape
        m = k.shape[2]
        scores = self._take((b, h, n, m), q)  # clean: given back in finally
        try:
            torch.matmul(q, k.transpose(-2, -1), out=scores)
            scores.mul_(self.scale)
            if mask is not None:
                scores.masked_fill_(~mask, float("-inf"))
            return torch.matmul(F.softmax(scores, dim=-1), v)
        finally:
            self._give(scores)


class BlockSparseAttention(nn.Module, PooledAttentionMixin):
    def __init__(self, head_dim: int, block: int, pool: Optional[TensorPool] = None) -> None:
        super().__init__()
        self.init_pool(pool)
        self.block = block
        self.scale = 1.0 / math.sqrt(head_dim)

    def _block_scores(self, qb: torch.Tensor, kb: torch.Tensor) -> torch.Tensor:
        shape = qb.shape[:-1] + (kb.shape[-2],)
        out = self._take(shape, qb)  # clean: returned to the caller
        torch.matmul(qb, kb.transpose(-2, -1), out=out)
        return out.mul_(self.scale)

    def forward(self, q, k, v, layout: torch.Tensor):
        b, h, n, d = q.shape
        nblk = n // self.block
        acc = torch.zeros_like(q)
        for i in range(nblk):
            qs = slice(i * self.block, (i + 1) * self.block)
            for j in range(nblk):
                ks = slice(j * self.block, (j + 1) * self.block)
                s = self._block_scores(q[:, :, qs], k[:, :, ks])  # leak: an inactive block continues without _give
                if not layout[i, j]:
                    continue
                acc[:, :, qs] += torch.matmul(s.exp(), v[:, :, ks])
                self._give(s)
        return acc

    def max_score(self, q, k) -> float:
        s = self._block_scores(q, k)  # clean: near miss, view is reduced first and s is given back
        flat = s.view(-1)
        best = flat.max().item()
        self._give(s)
        return best


class DilatedAttention(nn.Module, PooledAttentionMixin):
    def __init__(self, segment: int, rate: int, pool: Optional[TensorPool] = None) -> None:
        super().__init__()
        self.init_pool(pool)
        self.segment = segment
        self.rate = rate

    def forward(self, q, k, v):
        b, h, n, d = q.shape
        out = self._take(q.shape, q)  # leak: the clone is returned, the pooled tensor is dropped
        out.zero_()
        for start in range(0, n, self.segment):
            idx = torch.arange(start, min(start + self.segment, n), self.rate, device=q.device)
            seg = F.scaled_dot_product_attention(q[:, :, idx], k[:, :, idx], v[:, :, idx])
            out[:, :, idx] = seg
        return out.clone()

    def forward_chunked(self, q, k, v, chunk: int):
        tmp = None
        rows = []
        for start in range(0, q.shape[2], chunk):
            qc = q[:, :, start : start + chunk]
            if tmp is None or tmp.shape != qc.shape:
                tmp = self._take(qc.shape, qc)  # leak: a shorter last chunk rebinds tmp over the held one
            tmp.copy_(qc)
            rows.append(F.scaled_dot_product_attention(tmp, k, v))
        if tmp is not None:
            self._give(tmp)
        return torch.cat(rows, dim=2)

    def warm(self, shapes: List[Tuple[int, ...]], like: torch.Tensor) -> None:
        held = [self._take(s, like) for s in shapes]  # clean: near miss, the whole list is given back below
        for t in held:
            self._give(t)


def attention_norms(layer: DilatedAttention, x: torch.Tensor) -> Optional[float]:
    sq = layer._take(x.shape, x)  # leak: the non-finite return skips _give
    torch.mul(x, x, out=sq)
    total = sq.sum().item()
    if not math.isfinite(total):
        return None
    layer._give(sq)
    return math.sqrt(total)
