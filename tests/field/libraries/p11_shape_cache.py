"""Positional-bias and mask caches whose entries live in pooled tensors, keyed by shape."""
from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from typing import Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

ShapeKey = Tuple[int, int, int]


class BiasPool:
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._stock: Dict[ShapeKey, List[Tensor]] = defaultdict(list)
        self.outstanding = 0

    def get(self, heads: int, rows: int, cols: int) -> Tensor:
        stock = self._stock[(heads, rows, cols)]
        self.outstanding += 1
        try:
            return stock.pop()  # clean: handed to the caller
        except IndexError:
            return torch.empty(heads, rows, cols, dtype=self.dtype, device=self.device)

    def put_back(self, t: Tensor) -> None:
        self.outstanding -= 1
        self._stock[tuple(t.shape)].append(t)

    def steal(self, wanted: ShapeKey) -> Optional[Tensor]:
        """Carve a tensor of the wanted shape out of a larger one that is in stock."""
        need = math.prod(wanted)
        for shape, stock in self._stock.items():
            if not stock:
                continue
            donor = stock.pop()  # leak: a donor that is too small is neither used nor appended again
            if donor.numel() < need:
                continue
            self.outstanding += 1
            return donor.view(-1)[:need].view(wanted)
        return None


class BiasCache:
    """LRU cache of bias tensors; evicted entries return to the pool."""

    def __init__(self, pool: BiasPool, capacity: int = 8) -> None:
        self.pool = pool
        self.capacity = capacity
        self._entries: "OrderedDict[ShapeKey, Tensor]" = OrderedDict()

    def fetch(self, heads: int, rows: int, cols: int) -> Tensor:
        key = (heads, rows, cols)
        hit = self._entries.get(key)
        if hit is not None:
            self._entries.move_to_end(key)
            return hit
        if len(self._entries) >= self.capacity:
            _, old = self._entries.popitem(last=False)
            self.pool.put_back(old)
        entry = self.pool.get(heads, rows, cols)  # clean: near miss, stored in the cache, which returns it on eviction or clear
        fill_alibi(entry)
        self._entries[key] = entry
        return entry

    def clear(self) -> None:
        for entry in self._entries.values():
            self.pool.put_back(entry)
        self._entries.clear()


class RefreshingCache:
    """Keeps one bias per shape and rebuilds it whenever the slope scale changes."""

    def __init__(self, pool: BiasPool) -> None:
        self.pool = pool
        self._table: Dict[ShapeKey, Tensor] = {}
        self._scale: Dict[ShapeKey, float] = {}
        self._mask: Optional[Tensor] = None

    def lookup(self, key: ShapeKey, scale: float) -> Tensor:
        if self._scale.get(key) == scale:
            return self._table[key]
        entry = self.pool.get(*key)  # leak: a changed scale overwrites the table entry built for the old one
        fill_alibi(entry)
        entry.mul_(scale)
        self._table[key] = entry
        self._scale[key] = scale
        return entry

    def causal_mask(self, n: int) -> Tensor:
        if self._mask is not None and self._mask.shape[-1] == n:
            return self._mask
        if self._mask is not None:
            self.pool.put_back(self._mask)
        self._mask = self.pool.get(1, n, n)  # clean: near miss, the mask of another size was put back first
        self._mask.fill_(float("-inf")).triu_(1)
        return self._mask

    def clear(self) -> None:
        for entry in self._table.values():
            self.pool.put_back(entry)
        self._table.clear()
        self._scale.clear()
        if self._mask is not None:
            self.pool.put_back(self._mask)
            self._mask = None


class LastShapeCache:
    """Single-entry cache for the common case of a constant sequence length."""

    def __init__(self, pool: BiasPool) -> None:
        self.pool = pool
        self.key: Optional[ShapeKey] = None
        self.entry: Optional[Tensor] = None

    def fetch(self, key: ShapeKey) -> Tensor:
        if self.key != key:
            self.invalidate()
            self.entry = self.pool.get(*key)  # leak: invalidate puts back nothing once the key has been reset
            fill_alibi(self.entry)
            self.key = key
        return self.entry

    def reset_key(self) -> None:
        self.key = None

    def invalidate(self) -> None:
        if self.key is None:
            return
        self.pool.put_back(self.entry)
        self.entry = None
        self.key = None


def fill_alibi(t: Tensor) -> Tensor:
    heads, rows, cols = t.shape
    pos = torch.arange(cols, device=t.device)[None, :] - torch.arange(rows, device=t.device)[:, None]
    slopes = torch.tensor([2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads)], device=t.device)
    return t.copy_(-pos.abs()[None] * slopes.view(-1, 1, 1))


def bias_range(pool: BiasPool, key: ShapeKey) -> Tuple[float, float]:
    bias = pool.get(*key)  # leak: only the two extreme values leave the function
    fill_alibi(bias)
    return float(bias.min()), float(bias.max())


class BiasedAttention(nn.Module):
    def __init__(self, cache: BiasCache) -> None:
        super().__init__()
        self.cache = cache

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = self.cache.fetch(q.shape[1], q.shape[2], k.shape[2])
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
        return torch.softmax(scores, dim=-1) @ v

    def once(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pool = self.cache.pool
        bias = pool.get(q.shape[1], q.shape[2], k.shape[2])  # clean: near miss, fill_alibi returns the same tensor
        bias = fill_alibi(bias)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
        pool.put_back(bias)
        return torch.softmax(scores, dim=-1) @ v

    def windowed(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        pool = self.cache.pool
        bias = pool.get(q.shape[1], q.shape[2], k.shape[2])  # leak: masked_fill makes a new tensor, which then goes to the pool in its place
        fill_alibi(bias)
        pos = torch.arange(k.shape[2], device=q.device)[None, :] - torch.arange(q.shape[2], device=q.device)[:, None]
        bias = bias.masked_fill(pos.abs() > window, float("-inf"))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
        pool.put_back(bias)
        return torch.softmax(scores, dim=-1) @ v

    def windowed_inplace(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        pool = self.cache.pool
        bias = pool.get(q.shape[1], q.shape[2], k.shape[2])  # clean: near miss, masked_fill_ keeps the identity
        fill_alibi(bias)
        pos = torch.arange(k.shape[2], device=q.device)[None, :] - torch.arange(q.shape[2], device=q.device)[:, None]
        bias = bias.masked_fill_(pos.abs() > window, float("-inf"))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
        pool.put_back(bias)
        return torch.softmax(scores, dim=-1) @ v
