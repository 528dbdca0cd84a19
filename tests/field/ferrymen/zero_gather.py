"""Fully sharded parameters: gathered before a module runs, evicted after, prefetched in execution order."""
from __future__ import annotations

import collections
import logging
from typing import Callable, Optional

import torch
import torch.distributed as dist
from torch import nn

log = logging.getLogger("zero3")


class GatherPool:
    """Full-size buffers for gathered parameters; `limit` elements at once."""

    def __init__(self, limit: int, dtype: torch.dtype, device) -> None:
        self.limit = limit
        self.dtype, self.device = dtype, device
        self.live = 0
        self._bins: dict[int, list[torch.Tensor]] = collections.defaultdict(list)

    def materialize(self, numel: int) -> torch.Tensor:
        self.live += numel
        if self.live > self.limit:
            log.warning("gathered parameters: %d of %d elements", self.live, self.limit)
        if self._bins[numel]:
            return self._bins[numel].pop()
        return torch.empty(numel, dtype=self.dtype, device=self.device)

    def room_for(self, numel: int) -> bool:
        return self.live + numel <= self.limit

    def evict(self, full: torch.Tensor) -> None:
        self.live -= full.numel()
        self._bins[full.numel()].append(full)

    def trim(self) -> None:
        self._bins.clear()


class ShardedParam:
    def __init__(self, pool: GatherPool, shard: torch.Tensor, shape: torch.Size, group) -> None:
        self.pool = pool
        self.shard = shard
        self.shape = shape
        self.group = group
        self.full: Optional[torch.Tensor] = None
        self.users = 0
        self.grad_full: Optional[torch.Tensor] = None

    @property
    def padded(self) -> int:
        return self.shard.numel() * dist.get_world_size(self.group)

    def acquire(self) -> torch.Tensor:
        """The full parameter. Nested users share it, and the last release evicts it."""
        if self.users == 0:
            self.full = self.pool.materialize(self.padded)  # clean: near miss, the last release() evicts it
            dist.all_gather_into_tensor(self.full, self.shard, group=self.group)
        self.users += 1
        return self.full[:self.shape.numel()].view(self.shape)

    def release(self) -> None:
        self.users -= 1
        if self.users == 0:
            self.pool.evict(self.full)
            self.full = None

    def start_grad(self) -> torch.Tensor:
        self.grad_full = self.pool.materialize(self.padded)  # leak: an unused one is not evicted
        self.grad_full.zero_()
        return self.grad_full[:self.shape.numel()].view(self.shape)

    def finish_grad(self, used: bool) -> Optional[torch.Tensor]:
        if not used:
            self.grad_full = None
            return None
        out = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(out, self.grad_full, group=self.group)
        self.pool.evict(self.grad_full)
        self.grad_full = None
        return out


class GatheredModule:
    """Runs a module with its sharded parameters gathered."""

    def __init__(self, module: nn.Module, params: dict[str, ShardedParam]) -> None:
        self.module = module
        self.params = params
        self.frozen: set[str] = set()
        self.kept = False

    def pre_forward(self) -> None:
        if self.kept:
            return
        for name, param in self.params.items():
            weight = param.acquire()  # clean: near miss, post_forward or post_backward releases
            setattr(self.module, name, weight)

    def post_forward(self, training: bool) -> None:
        self.kept = self.kept or training
        if self.kept:
            return
        for param in self.params.values():
            param.release()

    def post_backward(self) -> None:
        if self.kept:
            for param in self.params.values():
                param.release()
            self.kept = False

    def infer(self, x: torch.Tensor) -> torch.Tensor:
        self.pre_forward()
        out = self.module(x)
        self.post_forward(training=False)
        return out

    def weight_norms(self) -> dict[str, float]:
        norms = {}
        for name, param in self.params.items():
            weight = param.acquire()  # leak: frozen parameters are not released
            norms[name] = float(weight.norm())
            if name in self.frozen:
                continue
            param.release()
        return norms

    def state(self) -> dict[str, torch.Tensor]:
        out = {}
        for name, param in self.params.items():
            out[name] = param.acquire().cpu()  # clean: released on the next line
            param.release()
        return out

    def patch(self, name: str, edit: Callable[[torch.Tensor], bool]) -> bool:
        """Edit one full parameter in place and scatter it back."""
        param = self.params[name]
        weight = param.acquire()  # leak: an edit that changes nothing returns before release
        if not edit(weight):
            return False
        rank = dist.get_rank(param.group)
        n = param.shard.numel()
        param.shard.copy_(param.full[rank * n:(rank + 1) * n])
        param.release()
        return True


class Prefetcher:
    """Buffers gathered ahead in the order of the last step."""

    def __init__(self, pool: GatherPool, order: list[ShardedParam], depth: int) -> None:
        self.pool = pool
        self.order = order
        self.depth = depth
        self.ahead: collections.deque = collections.deque()
        self.next = 0
        self.misses = 0

    def fill(self) -> None:
        while len(self.ahead) < self.depth and self.next < len(self.order):
            param = self.order[self.next]
            if not self.pool.room_for(param.padded):
                break
            full = self.pool.materialize(param.padded)  # leak: claim() discards others' buffers
            work = dist.all_gather_into_tensor(full, param.shard, group=param.group, async_op=True)
            self.ahead.append((param, full, work))
            self.next += 1

    def claim(self, param: ShardedParam) -> Optional[torch.Tensor]:
        """The buffer gathered ahead for the parameter; its release() evicts it then."""
        while self.ahead:
            owner, full, work = self.ahead.popleft()
            work.wait()
            if owner is param and owner.users == 0:
                owner.full, owner.users = full, owner.users + 1
                return full
            self.misses += 1
        return None

    def reset(self) -> None:
        for _, full, work in self.ahead:
            work.wait()
            self.pool.evict(full)
        self.ahead.clear()
        self.next = 0
