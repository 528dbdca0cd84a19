"""Parameter sharding: all-gather into pooled flat buffers around forward and backward."""
from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import Dict, List, Optional

import torch
import torch.nn as nn

logger = logging.getLogger(__name__)


class FlatBufferPool:
    def __init__(self, max_cached: int = 8) -> None:
        self._cached: Dict[int, List[torch.Tensor]] = defaultdict(list)
        self.max_cached = max_cached
        self.bytes_out = 0

    def alloc_flat(self, numel: int) -> torch.Tensor:
        self.bytes_out += numel * 4
        if self._cached[numel]:
            return self._cached[numel].pop()
        return torch.empty(numel)

    def free_flat(self, buf: torch.Tensor) -> None:
        self.bytes_out -= buf.numel() * 4
        if len(self._cached[buf.numel()]) < self.max_cached:
            self._cached[buf.numel()].append(buf)


@dataclass
class FlatParamMeta:
    name: str
    numel: int
    world: int
    mixed: bool = False


class FlatParamHandle:
    def __init__(self, meta: FlatParamMeta, shard: torch.Tensor, pool: FlatBufferPool) -> None:
        self.meta = meta
        self.shard = shard
        self.pool = pool
        self.full: Optional[torch.Tensor] = None
        self.grad_full: Optional[torch.Tensor] = None
        self.lowp: Optional[torch.Tensor] = None

    def unshard(self) -> torch.Tensor:
        if self.full is not None:
            return self.full
        self.full = self.pool.alloc_flat(self.meta.numel)  # clean: near miss, allocated only when empty, reshard frees it
        n = self.shard.numel()
        for r in range(self.meta.world):
            self.full[r * n : (r + 1) * n].copy_(self.shard)
        return self.full

    def reshard(self) -> None:
        if self.full is not None:
            self.pool.free_flat(self.full)
            self.full = None

    def prepare_grad(self) -> torch.Tensor:
        self.grad_full = self.pool.alloc_flat(self.meta.numel)  # leak: called once per micro batch, the former buffer is overwritten
        self.grad_full.zero_()
        return self.grad_full

    def reduce_grad(self) -> torch.Tensor:
        assert self.grad_full is not None
        n = self.shard.numel()
        out = self.grad_full[:n].clone()
        self.pool.free_flat(self.grad_full)
        self.grad_full = None
        return out

    def cast_low_precision(self) -> None:
        if self.meta.mixed and self.lowp is None:
            self.lowp = self.pool.alloc_flat(self.meta.numel)  # clean: near miss, free_low_precision tests the field rather than the mode
            self.lowp.copy_(self.unshard())  # clean: the full buffer stays in its field until reshard

    def free_low_precision(self) -> None:
        if self.lowp is not None:
            self.pool.free_flat(self.lowp)
            self.lowp = None


class ShardedModule(nn.Module):
    def __init__(self, inner: nn.Module, handle: FlatParamHandle, reshard_after_forward: bool = True) -> None:
        super().__init__()
        self.inner = inner
        self.handle = handle
        self.reshard_after_forward = reshard_after_forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.handle.unshard()  # clean: near miss, without reshard here the post-backward hook reshards
        y = self.inner(x)
        if self.reshard_after_forward:
            self.handle.reshard()
        return y

    def post_backward(self) -> torch.Tensor:
        self.handle.reshard()
        return self.handle.reduce_grad()

    def grad_norm(self, clip: Optional[float]) -> float:
        tmp = self.handle.pool.alloc_flat(self.handle.meta.numel)  # leak: the branch without clipping returns directly
        tmp.copy_(self.handle.unshard())  # clean: resharded on the next post_backward
        norm = float(tmp.norm())
        if clip is None:
            return norm
        tmp.clamp_(-clip, clip)
        norm = float(tmp.norm())
        self.handle.pool.free_flat(tmp)
        return norm


def gather_state(handles: List[FlatParamHandle], rank: int) -> Dict[str, torch.Tensor]:
    state: Dict[str, torch.Tensor] = {}
    for h in handles:
        buf = h.pool.alloc_flat(h.meta.numel)  # leak: ranks other than zero continue without freeing
        buf[: h.shard.numel()].copy_(h.shard)
        if rank != 0:
            continue
        state[h.meta.name] = buf.cpu().clone()
        h.pool.free_flat(buf)
    return state


def gather_state_rank0(handles: List[FlatParamHandle], rank: int) -> Dict[str, torch.Tensor]:
    state: Dict[str, torch.Tensor] = {}
    for h in handles:
        buf = h.pool.alloc_flat(h.meta.numel)  # clean: near miss, the free stands outside the rank test
        buf[: h.shard.numel()].copy_(h.shard)
        if rank == 0:
            state[h.meta.name] = buf.clone()
        h.pool.free_flat(buf)
    return state


def average(handles: List[FlatParamHandle]) -> List[torch.Tensor]:
    pool = handles[0].pool
    acc = pool.alloc_flat(handles[0].meta.numel)  # clean: near miss, view shares the storage and acc itself is freed
    acc.zero_()
    flat = acc.view(-1)
    for h in handles:
        flat += h.unshard()  # clean: resharded in the next line
        h.reshard()
    acc /= len(handles)
    out = [c.clone() for c in acc.chunk(handles[0].meta.world)]
    pool.free_flat(acc)
    return out


def ema_update(handle: FlatParamHandle, ema: torch.Tensor, decay: float) -> torch.Tensor:
    tmp = handle.pool.alloc_flat(handle.meta.numel)  # leak: the float64 cast is another tensor and that one is freed
    tmp.copy_(ema)
    tmp = tmp.to(torch.float64)
    tmp.mul_(decay)
    result = tmp.float()
    handle.pool.free_flat(tmp)
    return result
