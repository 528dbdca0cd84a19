from __future__ import annotations

from collections import defaultdict
from typing import Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TensorPool:
    def __init__(self, device: torch.device | str = "cuda"):
        self.device = torch.device(device)
        self._free: dict[tuple, list[Tensor]] = defaultdict(list)
        self.live = 0

    def get(self, shape: Sequence[int], dtype: torch.dtype = torch.float16) -> Tensor:
        self.live += 1
        bucket = self._free[(tuple(shape), dtype)]
        if bucket:
            return bucket.pop()
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def put(self, t: Tensor) -> None:
        self.live -= 1
        self._free[(tuple(t.shape), t.dtype)].append(t)


class DilatedAttention(nn.Module):
    def __init__(self, dim: int, heads: int, segments: Sequence[int], rates: Sequence[int], pool: TensorPool, max_len: int):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.segments, self.rates = list(segments), list(rates)
        self.pool = pool
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.max_len = max_len
        self._bias: Optional[Tensor] = pool.get((heads, max_len))  # clean: kept by the module, close() puts it
        self._index: Optional[Tensor] = pool.get((len(rates), max_len), torch.int64)  # leak: close() drops the field without a put
        self._cos: Optional[Tensor] = None
        self._fill()

    def _fill(self) -> None:
        assert self._bias is not None and self._index is not None
        self._bias.zero_()
        for i, r in enumerate(self.rates):
            self._index[i].copy_(torch.arange(self.max_len, device=self._index.device) // r * r)

    def set_max_len(self, max_len: int) -> None:
        if max_len <= self.max_len:
            return
        self.max_len = max_len
        if self._bias is not None:
            self.pool.put(self._bias)
        self._bias = self.pool.get((self.heads, max_len))  # clean: near miss, the old table was put back just above
        self._index = self.pool.get((len(self.rates), max_len), torch.int64)  # leak: overwrites the index table of the former length
        self._fill()

    def rope(self, length: int) -> Tensor:
        if self._cos is None or self._cos.shape[0] < length:
            if self._cos is not None:
                self.pool.put(self._cos)
            self._cos = self.pool.get((length, self.head_dim))  # clean: near miss, cached with put on growth and in close()
            torch.cos(torch.arange(length, device=self.pool.device).unsqueeze(1).expand(-1, self.head_dim), out=self._cos)
        return self._cos[:length]

    def _sparsify(self, x: Tensor, seg: int, rate: int) -> Tensor:
        b, h, n, d = x.shape
        view = x[:, :, : n // seg * seg].unflatten(2, (-1, seg))[:, :, :, ::rate]
        out = self.pool.get(view.shape, x.dtype)  # clean: returned to the caller
        out.copy_(view)
        return out

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        acc = self.pool.get((b, self.heads, n, self.head_dim), x.dtype)  # clean: near miss, cloned before it is put back
        acc.zero_()
        for seg, rate in zip(self.segments, self.rates):
            if n < seg:
                continue
            qs = self._sparsify(q, seg, rate)  # clean: near miss, put in every turn that gets this far
            ks = self._sparsify(k, seg, rate)  # leak: the continue for a one-token segment puts only qs
            if qs.shape[3] < 2:
                self.pool.put(qs)
                continue
            vs = self._sparsify(v, seg, rate)  # clean: taken after the short-segment continue and put below
            o = F.scaled_dot_product_attention(qs, ks, vs)
            acc[:, :, : n // seg * seg].unflatten(2, (-1, seg))[:, :, :, ::rate].add_(o)
            for t in (qs, ks, vs):
                self.pool.put(t)
        y = acc.transpose(1, 2).reshape(b, n, -1).clone()
        self.pool.put(acc)
        return self.proj(y)

    @torch.no_grad()
    def attention_map(self, x: Tensor, seg: int, rate: int) -> Tensor:
        q, k, _ = self.qkv(x).unflatten(-1, (3, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        qs = self._sparsify(q, seg, rate).float()  # leak: float() makes a copy and the pooled tensor is dropped
        ks = self._sparsify(k, seg, rate)  # clean: put once the scores are formed
        scores = torch.softmax(qs @ ks.float().transpose(-1, -2), dim=-1)
        self.pool.put(ks)
        return scores

    def close(self) -> None:
        for name in ("_bias", "_cos"):
            t = getattr(self, name)
            if t is not None:
                self.pool.put(t)
            setattr(self, name, None)
        self._index = None


class DilatedStack(nn.Module):
    def __init__(self, dim: int, depth: int, heads: int, pool: TensorPool, max_len: int):
        super().__init__()
        self.pool = pool
        self.layers = nn.ModuleList(DilatedAttention(dim, heads, [512, 1024], [1, 2], pool, max_len) for _ in range(depth))

    def forward(self, x: Tensor, residual_scale: float = 1.0) -> Tensor:
        res = self.pool.get(x.shape, x.dtype)  # clean: near miss, swapped with x's storage only by value and put at the end
        for layer in self.layers:
            res.copy_(x)
            x = layer(x).add(res, alpha=residual_scale)
        self.pool.put(res)
        return x

    def calibrate(self, batches: Sequence[Tensor]) -> list[float]:
        stats: list[float] = []
        absmax = self.pool.get((len(self.layers),), torch.float32)  # leak: break-out on a non-finite batch returns before the put
        absmax.zero_()
        for batch in batches:
            x = batch
            for i, layer in enumerate(self.layers):
                x = layer(x)
                absmax[i] = torch.maximum(absmax[i], x.abs().max().float())
            if not torch.isfinite(x).all():
                return stats
            stats.append(float(absmax.max()))
        self.pool.put(absmax)
        return stats

    def close(self) -> None:
        for layer in self.layers:
            layer.close()
