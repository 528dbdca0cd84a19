"""Ring attention with a shared workspace pool for the rotating K/V blocks."""
from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

import torch
import torch.nn as nn

logger = logging.getLogger(__name__)


@dataclass
class RingConfig:
    hidden: int = 1024
    heads: int = 16
    world_size: int = 4
    max_seq: int = 8192
    dtype: torch.dtype = torch.float32


class WorkspacePool:
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._free: Dict[Tuple[int, ...], List[torch.Tensor]] = {}
        self.outstanding = 0

    def acquire(self, *shape: int) -> torch.Tensor:
        stack = self._free.get(shape)
        self.outstanding += 1
        if stack:
            return stack.pop()
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def release(self, t: torch.Tensor) -> None:
        self.outstanding -= 1
        self._free.setdefault(tuple(t.shape), []).append(t)


class RingAttention(nn.Module):
    def __init__(self, cfg: RingConfig, pool: WorkspacePool) -> None:
        super().__init__()
        self.cfg = cfg
        self.pool = pool
        self.scale = 1.0 / math.sqrt(cfg.hidden // cfg.heads)
        self.qkv = nn.Linear(cfg.hidden, 3 * cfg.hidden)

    def _block_scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = self.pool.acquire(q.shape[0], q.shape[1], k.shape[1])  # clean: handed to the caller
        torch.bmm(q, k.transpose(1, 2), out=scores)
        scores.mul_(self.scale)
        return scores

    def forward_block(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = self._block_scores(q, k)  # clean: near miss, softmax copies and the scores go back before the return
        probs = torch.softmax(scores, dim=-1)
        self.pool.release(scores)
        return torch.bmm(probs, v)

    def forward_block_fused(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = self._block_scores(q, k)  # leak: rebound by softmax, what is released is a fresh tensor
        scores = torch.softmax(scores, dim=-1)
        out = torch.bmm(scores, v)
        self.pool.release(scores)
        return out

    def rotate(self, k_blocks: List[torch.Tensor], q: torch.Tensor, v_blocks: List[torch.Tensor]) -> torch.Tensor:
        acc = self.pool.acquire(*q.shape)  # leak: rebound by out-of-place division, workspace lost
        acc.zero_()
        denom = 0.0
        for k, v in zip(k_blocks, v_blocks):
            acc.add_(self.forward_block(q, k, v))
            denom += 1.0
        acc = acc / denom
        return acc

    def rotate_inplace(self, k_blocks: List[torch.Tensor], q: torch.Tensor, v_blocks: List[torch.Tensor]) -> torch.Tensor:
        acc = self.pool.acquire(*q.shape)  # clean: near miss, in-place division keeps the lease
        acc.zero_()
        for k, v in zip(k_blocks, v_blocks):
            acc += self.forward_block(q, k, v)
        acc /= max(len(k_blocks), 1)
        result = acc.clone()
        self.pool.release(acc)
        return result

    def masked_rotate(self, q: torch.Tensor, blocks: List[torch.Tensor], skip: Optional[List[bool]] = None) -> torch.Tensor:
        total = torch.zeros_like(q)
        for i, block in enumerate(blocks):
            stage = self.pool.acquire(*block.shape)  # leak: the continue for skipped blocks keeps the stage
            stage.copy_(block)
            if skip is not None and skip[i]:
                logger.debug("block %d masked out", i)
                continue
            total += self.forward_block(q, stage, stage)
            self.pool.release(stage)
        return total

    def causal_rotate(self, q: torch.Tensor, blocks: List[torch.Tensor], rank: int) -> torch.Tensor:
        total = torch.zeros_like(q)
        for i, block in enumerate(blocks):
            if i > rank:
                continue
            stage = self.pool.acquire(*block.shape)  # clean: near miss, the continue comes before the acquire
            stage.copy_(block)
            total += self.forward_block(q, stage, stage)
            self.pool.release(stage)
        return total


def lse_merge(pool: WorkspacePool, outs: List[torch.Tensor], lses: List[torch.Tensor]) -> torch.Tensor:
    weights = pool.acquire(len(lses), *lses[0].shape)  # clean: released through its own name after a view was used
    for i, lse in enumerate(lses):
        weights[i].copy_(lse)
    flat = weights.view(len(lses), -1)
    flat.sub_(flat.max(dim=0, keepdim=True).values)
    weights.exp_()
    norm = weights.sum(dim=0)
    merged = sum(o * (weights[i] / norm).unsqueeze(-1) for i, o in enumerate(outs))
    pool.release(weights)
    return merged


def warm_pool(pool: WorkspacePool, cfg: RingConfig) -> None:
    shape = (cfg.heads, cfg.max_seq // cfg.world_size, cfg.hidden // cfg.heads)
    held = [pool.acquire(*shape) for _ in range(2)]  # clean: every one is handed back below
    for t in held:
        pool.release(t)
    pool.acquire(*shape)  # leak: result discarded
