"""Unsharded flat parameters for an FSDP-like wrapper.

A FlatBlock is counted: every reader pins it, and it returns to the pool on the
last unpin. Blocks are cached by (numel, dtype).
"""
from __future__ import annotations

import threading
from typing import Iterable

import torch
import torch.distributed as dist


class FlatBlock:
    __slots__ = ("data", "refs", "home", "tag")

    def __init__(self, data: torch.Tensor, home: "FlatPool") -> None:
        self.data = data
        self.refs = 0
        self.home = home
        self.tag = ""

    def pin(self) -> "FlatBlock":
        self.refs += 1
        return self

    def unpin(self) -> None:
        self.refs -= 1
        if self.refs == 0:
            self.home._reclaim(self)


class FlatPool:
    def __init__(self, device: torch.device, max_cached: int = 8) -> None:
        self.device = device
        self.max_cached = max_cached
        self._cache: dict[tuple[int, torch.dtype], list[FlatBlock]] = {}
        self._gate = threading.BoundedSemaphore(max_cached)

    def rent(self, numel: int, dtype: torch.dtype) -> FlatBlock:
        """A block with one reference, held by the caller. Blocks while all are out."""
        self._gate.acquire()  # clean: released in _reclaim when the last reference goes
        bucket = self._cache.setdefault((numel, dtype), [])
        if bucket:
            return bucket.pop().pin()  # clean: handed to the caller with one reference
        return FlatBlock(torch.empty(numel, dtype=dtype, device=self.device), self).pin()  # clean: handed to the caller with one reference

    def rent_nowait(self, numel: int, dtype: torch.dtype, cached_only: bool = False) -> FlatBlock | None:
        if not self._gate.acquire(blocking=False):  # leak: the permit stays taken when cached_only finds an empty bucket
            return None
        bucket = self._cache.setdefault((numel, dtype), [])
        if bucket:
            return bucket.pop().pin()  # clean: handed to the caller with one reference
        if cached_only:
            return None
        return FlatBlock(torch.empty(numel, dtype=dtype, device=self.device), self).pin()  # clean: handed to the caller with one reference

    def _reclaim(self, block: FlatBlock) -> None:
        self._cache.setdefault((block.data.numel(), block.data.dtype), []).append(block)
        self._gate.release()


class FlatHandle:
    """Owns the local shard of one wrapped module."""

    def __init__(self, pool: FlatPool, shard: torch.Tensor, group, tag: str) -> None:
        self.pool = pool
        self.shard = shard
        self.group = group
        self.tag = tag
        self.block: FlatBlock | None = None
        self.eval_block: FlatBlock | None = None
        self.keep_after_forward = False

    @property
    def full_numel(self) -> int:
        return self.shard.numel() * dist.get_world_size(self.group)

    def unshard(self) -> torch.Tensor:
        if self.block is None:
            self.block = self.pool.rent(self.full_numel, self.shard.dtype)  # clean: kept in self.block until reshard
            dist.all_gather_into_tensor(self.block.data, self.shard, group=self.group)
        return self.block.data

    def reshard(self) -> None:
        if self.block is not None:
            self.block.unpin()
            self.block = None

    def post_forward(self) -> None:
        if not self.keep_after_forward:
            self.reshard()

    def post_backward(self) -> None:
        self.reshard()

    def begin_eval(self, weights: torch.Tensor) -> None:
        """Gather the averaged weights next to the trained ones."""
        self.eval_block = self.pool.rent(self.full_numel, self.shard.dtype)  # leak: a second begin_eval rebinds the attribute over a block in use
        dist.all_gather_into_tensor(self.eval_block.data, weights, group=self.group)

    def end_eval(self) -> None:
        if self.eval_block is not None:
            self.eval_block.unpin()
            self.eval_block = None

    def refresh_in_place(self) -> None:
        if self.block is not None:
            self.reshard()
        self.block = self.pool.rent(self.full_numel, self.shard.dtype)  # clean: near miss, reshard() cleared self.block just before
        dist.all_gather_into_tensor(self.block.data, self.shard, group=self.group)

    def view_for(self, reader: "ParamReader") -> None:
        if self.block is None:
            return
        reader.attach(self.block.pin())  # clean: near miss, the extra reference is dropped by reader.detach

    def reduce_grad(self, grad: torch.Tensor, average: bool) -> torch.Tensor:
        world = dist.get_world_size(self.group)
        staging = None
        if grad.dtype != self.shard.dtype:
            staging = self.pool.rent(grad.numel(), self.shard.dtype)  # clean: near miss, unpinned wherever staging was set
            staging.data.copy_(grad)
            grad = staging.data
        out = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(out, grad, group=self.group)
        if average:
            out.div_(world)
        if staging is not None:
            staging.unpin()
        return out

    def reduce_grad_padded(self, grad: torch.Tensor) -> torch.Tensor | None:
        pad = self.pool.rent(self.full_numel, grad.dtype)  # leak: not unpinned when the gradient is not finite
        pad.data[: grad.numel()].copy_(grad)
        pad.data[grad.numel():].zero_()
        if not torch.isfinite(pad.data).all():
            return None
        out = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(out, pad.data, group=self.group)
        pad.unpin()
        return out


class ParamReader:
    """Evaluation-side reader (EMA, logging) which may outlive a reshard."""

    def __init__(self) -> None:
        self.blocks: list[FlatBlock] = []
        self.latest: FlatBlock | None = None

    def attach(self, block: FlatBlock) -> None:
        self.blocks.append(block)

    def detach(self) -> None:
        while self.blocks:
            self.blocks.pop().unpin()

    def follow(self, block: FlatBlock) -> None:
        if self.latest is block:
            return
        if self.latest is not None:
            self.latest.unpin()
        self.latest = block.pin()  # clean: the block followed so far was unpinned first

    def unfollow(self) -> None:
        if self.latest is not None:
            self.latest.unpin()
            self.latest = None


class EMA:
    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.avg: dict[str, torch.Tensor] = {}

    def update(self, h: FlatHandle) -> None:
        if h.block is None:
            return
        b = h.block.pin()  # leak: the first update for a tag returns without unpin
        if h.tag not in self.avg:
            self.avg[h.tag] = b.data.clone()
            return
        self.avg[h.tag].lerp_(b.data, 1 - self.decay)
        b.unpin()

    def distance(self, h: FlatHandle) -> float:
        if h.block is None or h.tag not in self.avg:
            return 0.0
        b = h.block.pin()  # clean: unpinned in finally
        try:
            return (self.avg[h.tag] - b.data).norm().item()
        finally:
            b.unpin()


class Prefetcher:
    """Unshards the next handle ahead of time when a block is to be had."""

    def __init__(self, pool: FlatPool, order: list[FlatHandle]) -> None:
        self.pool = pool
        self.order = order

    def prefetch(self, i: int) -> bool:
        if i + 1 >= len(self.order):
            return False
        h = self.order[i + 1]
        if h.block is not None:
            return True
        b = self.pool.rent_nowait(h.full_numel, h.shard.dtype)  # clean: moved into the handle, resharded by it
        if b is None:
            return False
        b.tag = h.tag
        dist.all_gather_into_tensor(b.data, h.shard, group=h.group)
        h.block = b
        return True

    def prefetch_all(self, handles: Iterable[FlatHandle]) -> int:
        n = 0
        for h in handles:
            b = self.pool.rent_nowait(h.full_numel, h.shard.dtype)  # leak: handles that are already unsharded continue without unpin
            if b is None:
                break
            if h.block is not None:
                continue
            dist.all_gather_into_tensor(b.data, h.shard, group=h.group)
            h.block = b
            n += 1
        return n
