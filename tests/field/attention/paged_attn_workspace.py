"""Paged decode attention with a shared float workspace."""
from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

import torch
import torch.nn as nn

logger = logging.getLogger(__name__)


@dataclass
class AttnConfig:
    num_heads: int = 8
    head_dim: int = 64
    block_size: int = 16
    workspace_slots: int = 4
    max_splits: int = 8


class WorkspacePool:
    """Keeps flat workspace tensors per size and lends them out."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32):
        self.device = device
        self.dtype = dtype
        self._idle: Dict[Tuple[int, ...], List[torch.Tensor]] = {}
        self.outstanding = 0

    def borrow(self, *shape: int) -> torch.Tensor:
        bucket = self._idle.setdefault(tuple(shape), [])
        self.outstanding += 1
        if bucket:
            return bucket.pop()
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def give_back(self, t: torch.Tensor) -> None:
        self.outstanding -= 1
        self._idle.setdefault(tuple(t.shape), []).append(t)


class SplitKVAttention(nn.Module):
    def __init__(self, cfg: AttnConfig, pool: WorkspacePool):
        super().__init__()
        self.cfg = cfg
        self.pool = pool
        self.scale = 1.0 / math.sqrt(cfg.head_dim)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        b, h, d = q.shape
        scores = self.pool.borrow(b, h, k.shape[1])  # clean: given back below after use
        scores.copy_(torch.einsum("bhd,bthd->bht", q, k))
        scores.mul_(self.scale)
        probs = scores.softmax(dim=-1)
        out = torch.einsum("bht,bthd->bhd", probs, v)
        self.pool.give_back(scores)
        return out

    def forward_scaled(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        b, h, _ = q.shape
        scores = self.pool.borrow(b, h, k.shape[1])  # leak: rebound by the out-of-place product, the lent tensor is never returned
        scores.copy_(torch.einsum("bhd,bthd->bht", q, k))
        scores = scores * self.scale
        out = torch.einsum("bht,bthd->bhd", scores.softmax(dim=-1), v)
        self.pool.give_back(scores)
        return out

    def forward_masked(self, q, k, v, mask: Optional[torch.Tensor] = None) -> torch.Tensor:
        b, h, _ = q.shape
        scores = self.pool.borrow(b, h, k.shape[1])  # clean: near miss, in-place operators keep the same tensor
        scores.copy_(torch.einsum("bhd,bthd->bht", q, k))
        scores *= self.scale
        if mask is not None:
            scores += mask
        out = torch.einsum("bht,bthd->bhd", scores.softmax(dim=-1), v)
        self.pool.give_back(scores)
        return out

    def forward_splits(self, q, k, v, n_splits: int) -> torch.Tensor:
        b, h, d = q.shape
        partial = self.pool.borrow(n_splits, b, h, d)  # leak: the single split path returns without giving it back
        lse = self.pool.borrow(n_splits, b, h)  # clean: both ways give lse back
        chunk = (k.shape[1] + n_splits - 1) // n_splits
        for i in range(n_splits):
            ks = k[:, i * chunk:(i + 1) * chunk]
            vs = v[:, i * chunk:(i + 1) * chunk]
            s = torch.einsum("bhd,bthd->bht", q, ks) * self.scale
            lse[i] = s.logsumexp(dim=-1)
            partial[i] = torch.einsum("bht,bthd->bhd", s.softmax(dim=-1), vs)
        if n_splits == 1:
            self.pool.give_back(lse)
            return partial[0].clone()
        weights = lse.softmax(dim=0)
        out = (partial * weights.unsqueeze(-1)).sum(dim=0)
        self.pool.give_back(partial)
        self.pool.give_back(lse)
        return out

    def _gather(self, cache: torch.Tensor, table: List[int]) -> torch.Tensor:
        bs = self.cfg.block_size
        dst = self.pool.borrow(len(table) * bs, *cache.shape[2:])  # clean: handed to the caller
        for i, blk in enumerate(table):
            dst[i * bs:(i + 1) * bs] = cache[blk]
        return dst

    def decode_one(self, q, k_cache, v_cache, table: List[int]) -> torch.Tensor:
        k = self._gather(k_cache, table)  # clean: given back after the attention
        v = self._gather(v_cache, table)  # clean: given back after the attention
        s = torch.einsum("hd,thd->ht", q, k) * self.scale
        out = torch.einsum("ht,thd->hd", s.softmax(-1), v)
        self.pool.give_back(k)
        self.pool.give_back(v)
        return out

    def export_keys(self, k_cache: torch.Tensor, table: List[int]) -> torch.Tensor:
        return self._gather(k_cache, table).cpu().clone()  # leak: only the copy survives, the gathered buffer is dropped

    def key_norms(self, k_cache: torch.Tensor, table: List[int]) -> torch.Tensor:
        keys = self._gather(k_cache, table)  # clean: near miss, the view is dropped but the base goes back
        flat = keys.view(keys.shape[0], -1)
        norms = flat.norm(dim=-1)
        self.pool.give_back(keys)
        return norms


def warm_up(pool: WorkspacePool, sizes: List[Tuple[int, ...]]) -> int:
    held = []
    for s in sizes:
        held.append(pool.borrow(*s))  # clean: each one is returned in the loop below
    for t in held:
        pool.give_back(t)
    logger.info("warmed %d workspaces", len(sizes))
    return len(held)
