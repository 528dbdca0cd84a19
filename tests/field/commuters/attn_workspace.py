"""Attention forward with workspaces drawn from size buckets."""
from __future__ import annotations

import math
from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F


class WorkspaceBuckets:
    """Scratch tensors rounded up to a power of two, kept per bucket."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._buckets: dict[int, list[torch.Tensor]] = {}
        self.outstanding = 0

    @staticmethod
    def _round(numel: int) -> int:
        return 1 << max(numel - 1, 1).bit_length()

    def grab(self, numel: int) -> torch.Tensor:
        size = self._round(numel)
        bucket = self._buckets.setdefault(size, [])
        self.outstanding += 1
        if bucket:
            return bucket.pop()  # clean: straight to the caller
        return torch.empty(size, device=self.device, dtype=self.dtype)

    def grab_best(self, numel: int) -> Optional[torch.Tensor]:
        for size in sorted(self._buckets):
            if size < numel or not self._buckets[size]:
                continue
            ws = self._buckets[size].pop()  # clean: near miss, an oversized one is put back at once
            if ws.numel() > 8 * numel:
                self._buckets[size].append(ws)
                return None
            self.outstanding += 1
            return ws
        return None

    def stash(self, ws: torch.Tensor) -> None:
        self.outstanding -= 1
        self._buckets.setdefault(ws.numel(), []).append(ws)


class PooledAttention(nn.Module):
    def __init__(self, dim: int, heads: int, pool: WorkspaceBuckets) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.heads = heads
        self.pool = pool
        self._mask_ws: Optional[torch.Tensor] = None

    def _scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        b, h, s, d = q.shape
        t = k.shape[2]
        ws = self.pool.grab(b * h * s * t)  # clean: returned, the caller owns it
        torch.matmul(q, k.transpose(-1, -2), out=ws[: b * h * s * t].view(b, h, s, t))
        return ws.div_(math.sqrt(d))

    def _split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        b, s, d = x.shape
        qkv = self.qkv(x).view(b, s, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(self, x: torch.Tensor, causal: bool = True) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = self._split(x)
        n = b * self.heads * s * s
        ws = self._scores(q, k)  # clean: stashed after the softmax has been multiplied in
        scores = ws[:n].view(b, self.heads, s, s)
        if causal:
            scores.masked_fill_(torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf"))
        y = torch.matmul(F.softmax(scores, dim=-1), v)
        self.pool.stash(ws)
        return self.out(y.transpose(1, 2).reshape(b, s, d))

    def attention_map(self, x: torch.Tensor) -> torch.Tensor:
        q, k, _ = self._split(x)
        b, h, s, _ = q.shape
        weights = F.softmax(self._scores(q, k)[: b * h * s * s].view(b, h, s, s), dim=-1)  # leak: only the softmax copy survives the line
        return weights.mean(dim=1)

    def prepare_mask(self, length: int) -> None:
        if self._mask_ws is not None and self._mask_ws.numel() >= length * length:
            return
        self._mask_ws = self.pool.grab(length * length)  # leak: a smaller mask workspace still held is overwritten
        self._mask_ws[: length * length].zero_()

    def drop_mask(self) -> None:
        if self._mask_ws is not None:
            self.pool.stash(self._mask_ws)
            self._mask_ws = None

    def cross(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        q, _, _ = self._split(x)
        _, k, v = self._split(memory)
        b, h, s, dh = q.shape
        t = k.shape[2]
        ws = self._scores(q, k)  # clean: near miss, rebound to a view but the base is stashed
        base = ws
        ws = ws[: b * h * s * t].view(b, h, s, t).softmax(-1)
        y = ws @ v
        self.pool.stash(base)
        return self.out(y.transpose(1, 2).reshape(b, s, h * dh))


def chunked_logsumexp(pool: WorkspaceBuckets, q: torch.Tensor, k: torch.Tensor, chunk: int) -> torch.Tensor:
    parts = []
    for start in range(0, k.shape[0], chunk):
        kc = k[start:start + chunk]
        ws = pool.grab(q.shape[0] * kc.shape[0])  # leak: the all-padding continue leaves it out of the bucket
        view = ws[: q.shape[0] * kc.shape[0]].view(q.shape[0], kc.shape[0])
        torch.matmul(q, kc.T, out=view)
        if not torch.any(kc):
            continue
        parts.append(view.logsumexp(-1))
        pool.stash(ws)
    return torch.stack(parts).logsumexp(0)


def blockwise_max(pool: WorkspaceBuckets, blocks: list[torch.Tensor]) -> Optional[torch.Tensor]:
    if not blocks:
        return None
    running = pool.grab(blocks[0].numel())  # clean: near miss, result is cloned before the stash
    view = running[: blocks[0].numel()].view_as(blocks[0])
    view.copy_(blocks[0])
    for block in blocks[1:]:
        torch.maximum(view, block, out=view)
    result = view.clone()
    pool.stash(running)
    return result


def quantized_probe(pool: WorkspaceBuckets, x: torch.Tensor) -> float:
    lo = pool.grab_best(x.numel())  # leak: not stashed when the second workspace is missing
    if lo is None:
        return 0.0
    hi = pool.grab_best(x.numel())  # clean: None-checked, then stashed with the other
    if hi is None:
        return 0.0
    torch.floor(x.flatten(), out=lo[: x.numel()])
    torch.ceil(x.flatten(), out=hi[: x.numel()])
    err = float((hi[: x.numel()] - lo[: x.numel()]).mean())
    pool.stash(hi)
    pool.stash(lo)
    return err
