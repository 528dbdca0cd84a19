"""Parameter unsharding for a fully sharded model.

Every flat parameter owns one shard permanently. Its full view lives in storage from a
module-level cache of full-size blocks, is counted by users, and goes back on reshard.
"""
from __future__ import annotations

import logging
import threading
from collections import defaultdict
from contextlib import contextmanager
from typing import Callable, Dict, Iterable, List, Optional, Sequence

import torch

logger = logging.getLogger(__name__)

_blocks: Dict[int, List[torch.Tensor]] = defaultdict(list)
_blocks_lock = threading.Lock()
_outstanding = 0


def alloc_full(numel: int, dtype=torch.bfloat16) -> torch.Tensor:
    global _outstanding
    with _blocks_lock:
        _outstanding += 1
        if _blocks[numel]:
            return _blocks[numel].pop()
    return torch.empty(numel, dtype=dtype, device="cuda")


def free_full(block: torch.Tensor) -> None:
    global _outstanding
    with _blocks_lock:
        _outstanding -= 1
        _blocks[block.numel()].append(block)


class FlatParam:
    def __init__(self, name: str, shard: torch.Tensor, group):
        self.name = name
        self.shard = shard
        self.group = group
        self.full_numel = shard.numel() * group.size()
        self.full: Optional[torch.Tensor] = None
        self.grad_full: Optional[torch.Tensor] = None
        self.users = 0
        self.frozen = False

    def unshard(self) -> torch.Tensor:
        """Count one user in; each user calls reshard."""
        if self.users == 0:
            self.full = alloc_full(self.full_numel)  # clean: freed by the last reshard
            self.group.all_gather_into(self.full, self.shard)
        self.users += 1
        return self.full

    def reshard(self) -> None:
        self.users -= 1
        if self.users == 0:
            free_full(self.full)
            self.full = None

    def pre_backward(self) -> None:
        self.unshard()  # clean: near miss, post_backward reshards
        if not self.frozen:
            self.grad_full = alloc_full(self.full_numel)  # clean: near miss, freed under the same guard
            self.grad_full.zero_()

    def post_backward(self) -> Optional[torch.Tensor]:
        grad_shard = None
        if not self.frozen:
            grad_shard = torch.empty_like(self.shard)
            self.group.reduce_scatter(grad_shard, self.grad_full)
            free_full(self.grad_full)
            self.grad_full = None
        self.reshard()
        return grad_shard


class LowPrecisionParam(FlatParam):
    """Gathers in eight bits and keeps the scale of each rank next to it."""

    def __init__(self, name, shard, group, quantise: Callable):
        super().__init__(name, shard, group)
        self.quantise = quantise
        self.scales: Optional[torch.Tensor] = None

    def unshard(self) -> torch.Tensor:
        if self.users == 0:
            self.full = alloc_full(self.full_numel)  # clean: freed by the inherited reshard
            self.scales = alloc_full(self.group.size())  # leak: reshard frees full only, not scales
            packed, scale = self.quantise(self.shard)
            self.group.all_gather_into(self.scales, scale)
            self.group.all_gather_into(self.full, packed)
        self.users += 1
        return self.full


class Unit:
    """One wrapped module with its flat parameters."""

    def __init__(self, params: Sequence[FlatParam], reshard_after_forward: bool = True):
        self.params = list(params)
        self.reshard_after_forward = reshard_after_forward
        self.kept = 0
        self.prefetched = False

    def forward(self, module, *args):
        for param in self.params:
            param.unshard()  # clean: resharded after the module or by finish_step
        out = module(*args)
        if self.reshard_after_forward:
            for param in self.params:
                param.reshard()
        else:
            self.kept += 1
        return out

    def finish_step(self) -> None:
        while self.kept > 0:
            self.kept -= 1
            for param in self.params:
                param.reshard()

    def prefetch(self) -> None:
        if self.prefetched:
            return
        for param in self.params:
            param.unshard()  # clean: near miss, release_prefetch reshards when the flag is set
        self.prefetched = True

    def release_prefetch(self) -> None:
        if not self.prefetched:
            return
        self.prefetched = False
        for param in self.params:
            param.reshard()


@contextmanager
def summon_full(unit: Unit, writeback: bool = False):
    views = []
    for param in unit.params:
        views.append(param.unshard())  # clean: resharded in finally
    try:
        yield views
    finally:
        for param, view in zip(unit.params, views):
            if writeback:
                rank = param.group.rank()
                n = param.shard.numel()
                param.shard.copy_(view[rank * n:(rank + 1) * n])
            param.reshard()


class FullParams:
    """Context manager for checkpoint export on rank zero."""

    def __init__(self, units: Iterable[Unit], rank0_only: bool):
        self.units = list(units)
        self.rank0_only = rank0_only
        self._held: List[FlatParam] = []

    def __enter__(self) -> Dict[str, torch.Tensor]:
        state = {}
        for unit in self.units:
            for param in unit.params:
                full = param.unshard()  # leak: __exit__ returns early on the other ranks
                self._held.append(param)
                state[param.name] = full
        return state

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.rank0_only and self.units[0].params[0].group.rank() != 0:
            return False
        while self._held:
            self._held.pop().reshard()
        return False


def total_norm(units: Sequence[Unit]) -> float:
    total = 0.0
    for unit in units:
        with summon_full(unit) as views:  # clean: with block
            total += sum(float(v.float().pow(2).sum()) for v in views)
    return total ** 0.5


def any_nan(params: Iterable[FlatParam]) -> Optional[str]:
    for param in params:
        full = param.unshard()  # leak: the return inside the loop comes before reshard
        if torch.isnan(full).any():
            logger.error("nan in %s", param.name)
            return param.name
        param.reshard()
    return None


def gather_host_copy(param: FlatParam) -> torch.Tensor:
    return param.unshard().to("cpu", copy=True)  # leak: the user is counted in and never out


def merge_grads(param: FlatParam, micro_grads: Sequence[torch.Tensor], *, use_fp32: bool) -> torch.Tensor:
    """Sum micro-batch gradients and return this rank's shard of the sum."""
    acc = alloc_full(param.full_numel)  # leak: rebound below when use_fp32 is set
    acc.zero_()
    if use_fp32:
        acc = alloc_full(param.full_numel, dtype=torch.float32)  # clean: freed at the end
        acc.zero_()
    for grad in micro_grads:
        acc.add_(grad)
    out = torch.empty_like(param.shard)
    param.group.reduce_scatter(out, acc)
    free_full(acc)
    return out


def merge_pairwise(param: FlatParam, micro_grads: Sequence[torch.Tensor]) -> torch.Tensor:
    acc = alloc_full(param.full_numel)  # clean: near miss, freed each time it is replaced
    acc.copy_(micro_grads[0])
    for grad in micro_grads[1:]:
        nxt = alloc_full(param.full_numel)  # clean: near miss, becomes acc and is freed as such
        torch.add(acc, grad, out=nxt)
        free_full(acc)
        acc = nxt
    out = torch.empty_like(param.shard)
    param.group.reduce_scatter(out, acc)
    free_full(acc)
    return out
