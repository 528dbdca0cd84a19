"""Shape-keyed workspace tensors shared by the attention modules of one device."""
from __future__ import annotations

import contextlib
import math
import threading
from collections import defaultdict
from typing import Iterator, Optional, Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F


class WorkspacePool:
    """Idle tensors are shelved by (shape, dtype); lent ones are tracked by id."""

    def __init__(self, device: str = "cpu", limit_bytes: int = 1 << 30):
        self.device = torch.device(device)
        self.limit_bytes = limit_bytes
        self._idle: dict[tuple, list[torch.Tensor]] = defaultdict(list)
        self._lent: dict[int, tuple] = {}
        self._bytes = 0
        self._mu = threading.Lock()

    def checkout(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        key = (tuple(shape), dtype)
        with self._mu:
            shelf = self._idle[key]
            if shelf:
                t = shelf.pop()
            else:
                t = torch.empty(key[0], dtype=dtype, device=self.device)
                self._bytes += t.numel() * t.element_size()
            self._lent[id(t)] = key
        return t

    def try_checkout(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Optional[torch.Tensor]:
        need = math.prod(shape) * torch.finfo(dtype).bits // 8
        with self._mu:
            full = self._bytes + need > self.limit_bytes and not self._idle[(tuple(shape), dtype)]
        if full:
            return None
        return self.checkout(shape, dtype)  # clean: returned to the caller

    def checkin(self, t: torch.Tensor) -> None:
        with self._mu:
            key = self._lent.pop(id(t))
            self._idle[key].append(t)

    @property
    def outstanding(self) -> int:
        return len(self._lent)


@contextlib.contextmanager
def workspace(pool: WorkspacePool, shape: Sequence[int]) -> Iterator[torch.Tensor]:
    t = pool.checkout(shape)  # clean: given back in finally
    try:
        yield t
    finally:
        pool.checkin(t)


class DotProductAttention(nn.Module):
    def __init__(self, dim: int, heads: int, pool: WorkspacePool):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.pool = pool

    def _split(self, x: torch.Tensor):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return tuple(t.view(b, n, self.heads, -1).transpose(1, 2) for t in (q, k, v))

    def _causal_bias(self, n: int) -> torch.Tensor:
        bias = self.pool.checkout((n, n))  # clean: returned to the caller
        bias.fill_(float("-inf"))
        return bias.triu_(1)

    @torch.no_grad()
    def forward(self, x: torch.Tensor, causal: bool = True) -> torch.Tensor:
        q, k, v = self._split(x)
        b, h, n, d = q.shape
        scores = self.pool.checkout((b, h, n, n))  # clean: given back before the projection
        torch.matmul(q, k.transpose(-1, -2), out=scores)
        scores.mul_(self.scale)
        if causal:
            bias = self._causal_bias(n)  # clean: given back right after the add
            scores.add_(bias)
            self.pool.checkin(bias)
        ctx = torch.matmul(scores.softmax(-1), v)
        self.pool.checkin(scores)
        return self.proj(ctx.transpose(1, 2).reshape(b, n, h * d))

    @torch.no_grad()
    def attention_map(self, x: torch.Tensor, reduce: str = "mean") -> torch.Tensor:
        q, k, _ = self._split(x)
        b, h, n, _ = q.shape
        scores = self.pool.checkout((b, h, n, n))  # leak: not given back when reduce is unknown
        torch.matmul(q, k.transpose(-1, -2), out=scores)
        probs = scores.mul_(self.scale).softmax(-1)
        if reduce == "mean":
            result = probs.mean(1)
        elif reduce == "max":
            result = probs.amax(1)
        else:
            raise ValueError(f"unknown reduce {reduce!r}")
        self.pool.checkin(scores)
        return result

    def bias_table(self, n: int) -> torch.Tensor:
        return self._causal_bias(n).unsqueeze(0).clone()  # leak: the clone is returned, the pooled bias is dropped


class LocalAttention(nn.Module):
    """Block-diagonal attention over windows of a padded sequence."""

    def __init__(self, window: int, pool: WorkspacePool):
        super().__init__()
        self.window = window
        self.pool = pool

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(v)
        w = self.window
        for start in range(0, q.shape[0] - w + 1, w):
            tile = self.pool.checkout((w, w))  # leak: a fully padded window continues without checkin
            span = slice(start, start + w)
            keep = ~pad[span]
            if not bool(keep.any()):
                continue
            torch.matmul(q[span], k[span].T, out=tile)
            tile.masked_fill_(~keep, float("-inf"))
            out[span] = tile.softmax(-1) @ v[span]
            self.pool.checkin(tile)
        return out

    def forward_strided(self, q, k, v, stride: int, pad: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(v)
        for start in range(0, q.shape[0] - self.window + 1, stride):
            tile = self.pool.checkout((self.window, self.window))  # clean: given back before continue
            span = slice(start, start + self.window)
            torch.matmul(q[span], k[span].T, out=tile)
            if bool(pad[span].all()):
                self.pool.checkin(tile)
                continue
            out[span] += tile.softmax(-1) @ v[span]
            self.pool.checkin(tile)
        return out


class SlopeBias:
    def __init__(self, heads: int, pool: WorkspacePool):
        self.slopes = torch.tensor([2.0 ** (-8.0 * (i + 1) / heads) for i in range(heads)])
        self.pool = pool
        self._bias: Optional[torch.Tensor] = None

    def get(self, n: int) -> torch.Tensor:
        if self._bias is None or self._bias.shape[-1] < n:
            pos = torch.arange(n)
            dist = (pos[None, :] - pos[:, None]).float()
            self._bias = self.pool.checkout((len(self.slopes), n, n))  # leak: growth overwrites the previous table
            torch.mul(self.slopes[:, None, None], dist, out=self._bias)
        return self._bias[:, :n, :n]

    def close(self) -> None:
        if self._bias is not None:
            self.pool.checkin(self._bias)
            self._bias = None


class RelPosTable:
    def __init__(self, heads: int, pool: WorkspacePool):
        self.heads = heads
        self.pool = pool
        self._table: Optional[torch.Tensor] = None

    def get(self, n: int) -> torch.Tensor:
        if self._table is not None and self._table.shape[-1] < n:
            self.close()
        if self._table is None:
            self._table = self.pool.checkout((self.heads, n))  # clean: near miss, close() gives back the old table first
            self._table.normal_(std=0.02)
        return self._table[:, :n]

    def close(self) -> None:
        if self._table is not None:
            self.pool.checkin(self._table)
            self._table = None


def fused_scores(pool: WorkspacePool, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    shape = (q.shape[0], k.shape[0])
    ws = pool.try_checkout(shape)  # clean: near miss, None falls back to a private tensor
    scratch = ws if ws is not None else torch.empty(shape)
    torch.matmul(q, k.T, out=scratch)
    probs = F.softmax(scratch, dim=-1)
    if ws is not None:
        pool.checkin(ws)
    return probs


def two_pass_softmax(pool: WorkspacePool, x: torch.Tensor) -> Optional[torch.Tensor]:
    rows = (x.shape[0], 1)
    row_max = pool.try_checkout(rows)  # leak: not given back when row_sum is None
    if row_max is None:
        return None
    row_sum = pool.try_checkout(rows)  # clean: given back with row_max
    if row_sum is None:
        return None
    row_max.copy_(x.amax(-1, keepdim=True))
    y = torch.exp(x - row_max)
    row_sum.copy_(y.sum(-1, keepdim=True))
    y /= row_sum
    pool.checkin(row_sum)
    pool.checkin(row_max)
    return y


def chunked_cross_attention(pool: WorkspacePool, q: torch.Tensor, mem: torch.Tensor, chunk: int) -> torch.Tensor:
    parts = []
    for piece in q.split(chunk):
        with workspace(pool, (piece.shape[0], mem.shape[0])) as ws:  # clean: with block
            torch.matmul(piece, mem.T, out=ws)
            parts.append(ws.softmax(-1) @ mem)
    return torch.cat(parts)
