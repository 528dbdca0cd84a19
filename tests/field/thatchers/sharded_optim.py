"""Sharded Adam with rented fp32 work buffers and on-demand parameter gathers."""
import math
from collections import defaultdict
from typing import Dict, List, Optional

import torch
import torch.distributed as dist


class FlatPool:
    def __init__(self, device: torch.device, cap: int = 32):
        self.device = device
        self.cap = cap
        self.outstanding = 0
        self._bins: Dict[int, List[torch.Tensor]] = defaultdict(list)

    def rent(self, numel: int) -> torch.Tensor:
        size = 1 << max(10, math.ceil(math.log2(max(numel, 1))))
        self.outstanding += 1
        if self._bins[size]:
            return self._bins[size].pop()
        return torch.empty(size, dtype=torch.float32, device=self.device)

    def recycle(self, buf: torch.Tensor) -> None:
        self.outstanding -= 1
        self._bins[buf.numel()].append(buf)


class ParamShard:
    def __init__(self, name: str, shard: torch.Tensor, world: int):
        self.name = name
        self.shard = shard
        self.world = world
        self.full: Optional[torch.Tensor] = None
        self.users = 0
        self.grad: Optional[torch.Tensor] = None

    def materialize(self, pool: FlatPool) -> torch.Tensor:
        if self.users == 0:
            self.full = pool.rent(self.shard.numel() * self.world)  # clean: near miss, partition() recycles it with the last user
            dist.all_gather_into_tensor(self.full[: self.shard.numel() * self.world], self.shard)
        self.users += 1
        return self.full

    def partition(self, pool: FlatPool) -> None:
        self.users -= 1
        if self.users == 0:
            pool.recycle(self.full)
            self.full = None


class ShardedAdam:
    def __init__(self, shards: List[ParamShard], pool: FlatPool, lr: float = 1e-4, eps: float = 1e-8):
        self.shards = shards
        self.pool = pool
        self.lr = lr
        self.eps = eps
        self.master: Dict[str, torch.Tensor] = {}
        self._norm_buf: Optional[torch.Tensor] = None
        self._scratch: Optional[torch.Tensor] = None

    def init_master(self) -> None:
        for p in self.shards:
            if p.name in self.master:
                continue
            buf = self.pool.rent(p.shard.numel())  # clean: near miss, kept in the master table until teardown() recycles it
            buf[: p.shard.numel()].copy_(p.shard)
            self.master[p.name] = buf

    def reload_master(self, state: Dict[str, torch.Tensor]) -> None:
        for name, value in state.items():
            buf = self.pool.rent(value.numel())  # leak: the table entry that it replaces is never recycled
            buf[: value.numel()].copy_(value)
            self.master[name] = buf

    def step(self) -> int:
        updated = 0
        for p in self.shards:
            if p.grad is None:
                continue
            g = self.pool.rent(p.shard.numel())  # leak: a non-finite gradient continues with the work buffer rented
            n = p.shard.numel()
            g[:n].copy_(p.grad)
            if not torch.isfinite(g[:n]).all():
                p.grad = None
                continue
            self.master[p.name][:n].add_(g[:n], alpha=-self.lr)
            p.shard.copy_(self.master[p.name][:n])
            self.pool.recycle(g)
            updated += 1
        return updated

    def step_clipped(self, max_norm: float) -> int:
        updated = 0
        for p in self.shards:
            if p.grad is None:
                continue
            n = p.shard.numel()
            g = self.pool.rent(n)  # clean: near miss, recycled before the continue as well as at the end
            g[:n].copy_(p.grad)
            norm = g[:n].norm().item()
            if math.isnan(norm):
                self.pool.recycle(g)
                continue
            if norm > max_norm:
                g[:n].mul_(max_norm / norm)
            self.master[p.name][:n].add_(g[:n], alpha=-self.lr)
            self.pool.recycle(g)
            updated += 1
        return updated

    def grad_norm(self) -> float:
        if self._norm_buf is None:
            self._norm_buf = self.pool.rent(len(self.shards))  # clean: near miss, cached once and recycled by teardown()
        for i, p in enumerate(self.shards):
            self._norm_buf[i] = 0.0 if p.grad is None else p.grad.norm()
        return self._norm_buf[: len(self.shards)].norm().item()

    def trust_ratio(self, p: ParamShard) -> float:
        n = p.shard.numel()
        w = self.pool.rent(n)  # leak: a shard with zero norm takes the early return
        w[:n].copy_(p.shard)
        w_norm = w[:n].norm().item()
        if w_norm == 0.0 or p.grad is None:
            return 1.0
        ratio = w_norm / (p.grad.norm().item() + self.eps)
        self.pool.recycle(w)
        return ratio

    def _scratch_for(self, numel: int) -> torch.Tensor:
        if self._scratch is None or self._scratch.numel() < numel:
            self._scratch = self.pool.rent(numel)  # leak: growing overwrites the smaller scratch, which stays rented
        return self._scratch

    def precondition(self, p: ParamShard) -> None:
        n = p.shard.numel()
        tmp = self._scratch_for(n)  # clean: lent by the optimizer, which owns the field
        torch.sqrt(p.shard.abs(), out=tmp[:n])
        p.shard.div_(tmp[:n] + self.eps)

    def teardown(self) -> None:
        for buf in self.master.values():
            self.pool.recycle(buf)
        self.master.clear()
        for attr in ("_norm_buf", "_scratch"):
            buf = getattr(self, attr)
            if buf is not None:
                self.pool.recycle(buf)
                setattr(self, attr, None)


def forward_layer(layer: List[ParamShard], x: torch.Tensor, pool: FlatPool) -> torch.Tensor:
    for p in layer:
        w = p.materialize(pool)  # clean: partitioned after use in every turn
        x = torch.nn.functional.linear(x, w[: x.shape[-1] ** 2].view(x.shape[-1], -1))
        p.partition(pool)
    return x


def tied_logits(embed: ParamShard, head: ParamShard, x: torch.Tensor, pool: FlatPool) -> torch.Tensor:
    dim = x.shape[-1]
    e = embed.materialize(pool)  # clean: partitioned below on both branches
    if head is embed:
        out = x @ e[: dim * dim].view(dim, -1)
    else:
        h = head.materialize(pool)  # leak: embed is partitioned below and the untied head never is
        out = x @ (e[: dim * dim] + h[: dim * dim]).view(dim, -1)
    embed.partition(pool)
    return out
