"""Bucketed gradient reduction for data parallel training.

Gradients are packed into flat buffers, reduced over the process group and
scattered back.  Flat buffers come from a pool sized at start-up so that a
step never calls the caching allocator in the hot path.
"""
from __future__ import annotations

import collections
import logging
from dataclasses import dataclass
from typing import Iterable, Optional

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

ALIGN = 512


def _aligned(numel: int) -> int:
    return (numel + ALIGN - 1) // ALIGN * ALIGN


class FlatBufferPool:
    """Flat one-dimensional buffers, shelved by their aligned size."""

    def __init__(self, device: torch.device, dtype: torch.dtype, cap: int = 32):
        self.device = device
        self.dtype = dtype
        self.cap = cap
        self._idle: dict[int, list[torch.Tensor]] = collections.defaultdict(list)
        self._out = 0

    def rent(self, numel: int) -> Optional[torch.Tensor]:
        size = _aligned(numel)
        shelf = self._idle[size]
        if self._out >= self.cap:
            return None
        if shelf:
            flat = shelf.pop()  # clean: returned to the caller
        else:
            flat = torch.empty(size, device=self.device, dtype=self.dtype)
        self._out += 1
        return flat

    def restore(self, flat: torch.Tensor) -> None:
        self._out -= 1
        self._idle[flat.numel()].append(flat)

    @property
    def outstanding(self) -> int:
        return self._out


@dataclass
class Bucket:
    params: list[torch.nn.Parameter]
    flat: torch.Tensor
    wire: Optional[torch.Tensor] = None
    work: Optional[dist.Work] = None

    @property
    def numel(self) -> int:
        return sum(p.numel() for p in self.params)


def pack(params: Iterable[torch.nn.Parameter], flat: torch.Tensor) -> int:
    off = 0
    for p in params:
        n = p.numel()
        if p.grad is None:
            flat[off:off + n].zero_()
        else:
            flat[off:off + n].copy_(p.grad.view(-1))
        off += n
    return off


def unpack(params: Iterable[torch.nn.Parameter], flat: torch.Tensor) -> None:
    off = 0
    for p in params:
        n = p.numel()
        if p.grad is not None:
            p.grad.view(-1).copy_(flat[off:off + n])
        off += n


class BucketReducer:
    def __init__(self, pool: FlatBufferPool, wire_pool: FlatBufferPool, group=None):
        self.pool = pool
        self.wire_pool = wire_pool
        self.group = group
        self.pending: dict[int, Bucket] = {}
        self.residual: Optional[torch.Tensor] = None
        self.skipped = 0

    def open(self, index: int, params: list[torch.nn.Parameter]) -> Bucket:
        if index in self.pending:
            return self.pending[index]
        flat = self.pool.rent(sum(p.numel() for p in params))  # clean: moved into self.pending, which finish() empties
        if flat is None:
            raise MemoryError("gradient buffers exhausted")
        pack(params, flat)
        bucket = Bucket(params, flat)
        self.pending[index] = bucket
        return bucket

    def launch(self, index: int) -> bool:
        bucket = self.pending[index]
        wire = self.wire_pool.rent(bucket.flat.numel())  # leak: not given back when the group has a single rank
        if wire is None:
            return False
        wire.copy_(bucket.flat)
        if dist.get_world_size(self.group) == 1:
            return True
        bucket.wire = wire
        bucket.work = dist.all_reduce(wire, group=self.group, async_op=True)
        return True

    def finish(self) -> None:
        scale = 1.0 / dist.get_world_size(self.group)
        for index in sorted(self.pending):
            bucket = self.pending[index]
            if bucket.work is not None:
                bucket.work.wait()
                bucket.flat.copy_(bucket.wire)
                bucket.flat.mul_(scale)
            unpack(bucket.params, bucket.flat)
            if bucket.wire is not None:
                self.wire_pool.restore(bucket.wire)
            self.pool.restore(bucket.flat)
        self.pending.clear()

    def global_norm(self, params: list[torch.nn.Parameter]) -> float:
        flat = self.pool.rent(sum(p.numel() for p in params))  # clean: given back in finally
        if flat is None:
            return self._norm_by_param(params)
        try:
            used = pack(params, flat)
            sq = flat[:used].float().pow(2).sum()
            dist.all_reduce(sq, group=self.group)
            return float(sq.sqrt())
        finally:
            self.pool.restore(flat)

    def _norm_by_param(self, params) -> float:
        total = torch.zeros((), device=self.pool.device)
        for p in params:
            if p.grad is not None:
                total += p.grad.float().pow(2).sum()
        return float(total.sqrt())

    def has_overflow(self, params: list[torch.nn.Parameter]) -> bool:
        flat = self.pool.rent(sum(p.numel() for p in params))  # leak: the early return on a non-finite value keeps it
        if flat is None:
            return any(not torch.isfinite(p.grad).all() for p in params if p.grad is not None)
        used = pack(params, flat)
        if not torch.isfinite(flat[:used]).all():
            self.skipped += 1
            log.warning("non-finite gradients, skipping step (%d so far)", self.skipped)
            return True
        self.pool.restore(flat)
        return False

    def compress(self, bucket: Bucket) -> None:
        """Top-k with error feedback; the rest is carried to the next step."""
        rest = self.pool.rent(bucket.numel)  # leak: rebinding self.residual drops the one of the last step
        if rest is None:
            return
        if self.residual is not None:
            bucket.flat.add_(self.residual)
        threshold = bucket.flat.abs().quantile(0.99)
        torch.where(bucket.flat.abs() < threshold, bucket.flat, 0.0, out=rest)
        bucket.flat.sub_(rest)
        self.residual = rest

    def close(self) -> None:
        for bucket in self.pending.values():
            if bucket.wire is not None:
                self.wire_pool.restore(bucket.wire)
            self.pool.restore(bucket.flat)
        self.pending.clear()
        if self.residual is not None:
            self.pool.restore(self.residual)
            self.residual = None


class HierarchicalReducer:
    """Reduce within the node first, then across nodes on local rank 0."""

    def __init__(self, pool: FlatBufferPool, local_group, cross_group, is_leader: bool):
        self.pool = pool
        self.local_group = local_group
        self.cross_group = cross_group
        self.is_leader = is_leader

    def _rent_pair(self, numel: int):
        a = self.pool.rent(numel)  # clean: near miss, rolled back when the second is missing
        if a is None:
            return None
        b = self.pool.rent(numel)  # clean: returned to the caller in the pair
        if b is None:
            self.pool.restore(a)
            return None
        return a, b

    def reduce(self, params: list[torch.nn.Parameter]) -> bool:
        pair = self._rent_pair(sum(p.numel() for p in params))  # clean: both given back in finally
        if pair is None:
            return False
        local, cross = pair
        try:
            pack(params, local)
            dist.reduce(local, dst=0, group=self.local_group)
            if self.is_leader:
                cross.copy_(local)
                dist.all_reduce(cross, group=self.cross_group)
                local.copy_(cross)
            dist.broadcast(local, src=0, group=self.local_group)
            unpack(params, local)
            return True
        finally:
            self.pool.restore(local)
            self.pool.restore(cross)

    def reduce_mean_std(self, params: list[torch.nn.Parameter]):
        numel = sum(p.numel() for p in params)
        first = self.pool.rent(numel)  # leak: kept when the second moment buffer is not available
        if first is None:
            return None
        second = self.pool.rent(numel)  # clean: given back at the end, None-checked before
        if second is None:
            log.info("no room for second moments")
            return None
        pack(params, first)
        torch.mul(first, first, out=second)
        dist.all_reduce(first, group=self.local_group)
        dist.all_reduce(second, group=self.local_group)
        n = dist.get_world_size(self.local_group)
        mean = float(first.mean()) / n
        var = float(second.mean()) / n - mean * mean
        self.pool.restore(second)
        self.pool.restore(first)
        return mean, max(var, 0.0) ** 0.5
