"""Blockwise attention with a shared scratch workspace.

Score and softmax buffers are large and short-lived, so every attention layer on a
device borrows them from one `WorkspacePool` instead of going through the caching
allocator on every microbatch.
"""
from __future__ import annotations

import contextlib
import math
from typing import Dict, List, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F


class WorkspacePool:
    """Free lists keyed by rounded-up element count."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32, max_bytes: int = 1 << 30):
        self.device = device
        self.dtype = dtype
        self.max_bytes = max_bytes
        self._free: Dict[int, List[torch.Tensor]] = {}
        self._allocated = 0

    @staticmethod
    def _bucket(numel: int) -> int:
        return 1 << max(10, (numel - 1).bit_length())

    def checkout(self, numel: int) -> torch.Tensor:
        bucket = self._bucket(numel)
        stack = self._free.setdefault(bucket, [])
        if stack:
            return stack.pop()  # clean: handed to the caller
        nbytes = bucket * self.dtype.itemsize
        if self._allocated + nbytes > self.max_bytes:
            raise MemoryError(f"workspace exhausted ({self._allocated} bytes out)")
        self._allocated += nbytes
        return torch.empty(bucket, device=self.device, dtype=self.dtype)

    def checkin(self, buf: torch.Tensor) -> None:
        self._free.setdefault(buf.numel(), []).append(buf)

    @contextlib.contextmanager
    def scratch(self, numel: int):
        buf = self.checkout(numel)  # clean: finally gives it back
        try:
            yield buf
        finally:
            self.checkin(buf)


def _as_scores(buf: torch.Tensor, b: int, h: int, q: int, k: int) -> torch.Tensor:
    return buf[: b * h * q * k].view(b, h, q, k)


class BlockwiseAttention(nn.Module):
    def __init__(self, dim: int, heads: int, pool: WorkspacePool, block: int = 512, causal: bool = True):
        super().__init__()
        self.heads = heads
        self.head_dim = dim // heads
        self.block = block
        self.causal = causal
        self.pool = pool
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self._mask_buf: Optional[torch.Tensor] = None

    def _split(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        b, n, _ = x.shape
        qkv = self.qkv(x).view(b, n, 3, self.heads, self.head_dim)
        q, k, v = qkv.unbind(dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _block_scores(self, q: torch.Tensor, k: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Returns the flat workspace together with the 4-d view over it."""
        b, h, nq, d = q.shape
        nk = k.shape[2]
        flat = self.pool.checkout(b * h * nq * nk)  # clean: returned along with its view
        scores = _as_scores(flat, b, h, nq, nk)
        torch.matmul(q, k.transpose(-1, -2), out=scores)
        scores.mul_(1.0 / math.sqrt(d))
        return flat, scores

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self._split(x)
        outs = []
        for start in range(0, n, self.block):
            end = min(start + self.block, n)
            limit = end if self.causal else n
            flat, scores = self._block_scores(q[:, :, start:end], k[:, :, :limit])  # clean: checked in at the bottom of the loop
            if self.causal:
                idx = torch.arange(start, end, device=x.device)[:, None]
                scores.masked_fill_(idx < torch.arange(limit, device=x.device), float("-inf"))
            outs.append(F.softmax(scores, dim=-1) @ v[:, :, :limit])
            self.pool.checkin(flat)
        out = torch.cat(outs, dim=2).transpose(1, 2).reshape(b, n, c)
        return self.proj(out)

    def forward_masked(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """keep: (n_blocks,) bool, blocks that are pure padding are skipped."""
        b, n, c = x.shape
        q, k, v = self._split(x)
        out = torch.zeros_like(q)
        for i, start in enumerate(range(0, n, self.block)):
            end = min(start + self.block, n)
            flat, scores = self._block_scores(q[:, :, start:end], k)  # leak: the continue for padding blocks skips the checkin
            if not bool(keep[i]):
                continue
            out[:, :, start:end] = F.softmax(scores, dim=-1) @ v
            self.pool.checkin(flat)
        return self.proj(out.transpose(1, 2).reshape(b, n, c))

    def attention_entropy(self, x: torch.Tensor) -> torch.Tensor:
        q, k, _ = self._split(x)
        _, scores = self._block_scores(q, k)  # leak: the flat workspace is discarded, only the view is used
        p = F.softmax(scores, dim=-1)
        return -(p * (p + 1e-9).log()).sum(-1).mean()

    def max_logit(self, x: torch.Tensor) -> float:
        q, k, _ = self._split(x)
        flat, scores = self._block_scores(q, k)  # clean: near miss, the early return checks it in first
        if scores.numel() == 0:
            self.pool.checkin(flat)
            return 0.0
        peak = scores.amax().item()
        self.pool.checkin(flat)
        return peak

    def prepare_mask(self, n: int) -> torch.Tensor:
        if self._mask_buf is not None and self._mask_buf.numel() < n * n:
            self.pool.checkin(self._mask_buf)
            self._mask_buf = None
        if self._mask_buf is None:
            self._mask_buf = self.pool.checkout(n * n)  # clean: near miss, a smaller one was checked in above; release() returns this one
        mask = self._mask_buf[: n * n].view(n, n)
        return mask.fill_(float("-inf")).triu_(1)

    def rebuild_mask(self, n: int, window: int) -> torch.Tensor:
        self._mask_buf = self.pool.checkout(n * n)  # leak: overwrites a mask buffer that prepare_mask may have left in the field
        mask = self._mask_buf[: n * n].view(n, n)
        mask.fill_(float("-inf"))
        return mask.triu_(1) + mask.tril(-window)

    def release(self) -> None:
        if self._mask_buf is not None:
            self.pool.checkin(self._mask_buf)
            self._mask_buf = None


def profile_layer(layer: BlockwiseAttention, x: torch.Tensor, steps: int = 10) -> float:
    with layer.pool.scratch(x.numel()) as tmp:  # clean: context manager
        staged = tmp[: x.numel()].view_as(x)
        staged.copy_(x)
        total = 0.0
        for _ in range(steps):
            total += layer(staged).float().norm().item()
    return total / steps


def compare_blocks(layer: BlockwiseAttention, x: torch.Tensor, ref: torch.Tensor, tol: float) -> bool:
    diff = layer.pool.checkout(x.numel())  # leak: a shape mismatch returns before the checkin
    if ref.shape != x.shape:
        return False
    view = diff[: x.numel()].view_as(x)
    torch.sub(layer(x), ref, out=view)
    ok = view.abs().max().item() <= tol
    layer.pool.checkin(diff)
    return ok


def warm_pool(pool: WorkspacePool, seqlens: List[int], heads: int) -> None:
    for n in seqlens:
        pool.checkout(heads * n * n).zero_()  # leak: the zeroed buffer is dropped on the spot
