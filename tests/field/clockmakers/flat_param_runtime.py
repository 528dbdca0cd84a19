"""Unshard / reshard runtime for flat parameters.

All-gather outputs come from a cache of flat tensors keyed by (numel, dtype) so
that the caching allocator does not fragment between layers of uneven size.
"""
from __future__ import annotations

from collections import defaultdict
from typing import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd import Variable


class GatherCache:
    def __init__(self, device: torch.device, limit: int = 64):
        self.device = device
        self.limit = limit
        self._shelf: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self.outstanding = 0

    def checkout(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        shelf = self._shelf[(numel, dtype)]
        self.outstanding += 1
        if shelf:
            return shelf.pop()  # clean: returned to the caller
        return torch.empty(numel, dtype=dtype, device=self.device)

    def checkin(self, t: torch.Tensor) -> None:
        self.outstanding -= 1
        shelf = self._shelf[(t.numel(), t.dtype)]
        if len(shelf) < self.limit:
            shelf.append(t)

    def trim(self) -> None:
        self._shelf.clear()


class FlatHandle:
    def __init__(self, module: nn.Module, shard: torch.Tensor, world: int, cache: GatherCache, group):
        self.module = module
        self.shard = shard
        self.world = world
        self.cache = cache
        self.group = group
        self.index = -1
        self.mixed = shard.dtype is not torch.float32
        self._full: torch.Tensor | None = None
        self._grad: torch.Tensor | None = None
        self._loaded: torch.Tensor | None = None
        self._compute: torch.Tensor | None = None

    @property
    def full_numel(self) -> int:
        return self.shard.numel() * self.world

    def unshard(self) -> None:
        if self._full is not None:
            return
        self._full = self.cache.checkout(self.full_numel, self.shard.dtype)  # clean: kept in _full, which reshard() checks in
        dist.all_gather_into_tensor(self._full, self.shard, group=self.group)

    def reshard(self) -> None:
        if self._full is None:
            return
        full, self._full = self._full, None
        self.cache.checkin(full)

    def load_shard(self, state: torch.Tensor) -> None:
        self.shard.copy_(state)
        self._loaded = self.cache.checkout(self.full_numel, self.shard.dtype)  # leak: a second load overwrites the first _loaded without checking it in
        dist.all_gather_into_tensor(self._loaded, self.shard, group=self.group)

    def drop_loaded(self) -> None:
        if self._loaded is not None:
            self.cache.checkin(self._loaded)
            self._loaded = None

    # -- gradients --------------------------------------------------------------

    def prepare_grad(self) -> None:
        if self._grad is not None:
            self.cache.checkin(self._grad)
        self._grad = self.cache.checkout(self.full_numel, torch.float32)  # clean: near miss, the old one is checked in first and finish_grad() ends it
        self._grad.zero_()

    def finish_grad(self) -> torch.Tensor:
        out = torch.empty(self.shard.numel(), dtype=torch.float32, device=self.shard.device)
        if self._grad is None:
            return out.zero_()
        dist.reduce_scatter_tensor(out, self._grad, group=self.group)
        self.cache.checkin(self._grad)
        self._grad = None
        return out

    def begin_compute(self) -> None:
        if self.mixed and self._compute is None:
            self._compute = self.cache.checkout(self.shard.numel(), torch.float32)  # clean: near miss, end_compute() has the same guard on mixed
            self._compute.copy_(self.shard)

    def end_compute(self) -> None:
        if self.mixed and self._compute is not None:
            self.shard.copy_(self._compute)
            self.cache.checkin(self._compute)
            self._compute = None

    # -- reads ------------------------------------------------------------------

    def gathered(self, dtype: torch.dtype) -> torch.Tensor:
        """Full flat tensor in ``dtype``. It comes from the cache; check it in after use."""
        out = self.cache.checkout(self.full_numel, dtype)  # clean: returned to the caller
        src = self.shard.to(dtype)
        dist.all_gather_into_tensor(out, src, group=self.group)
        return out

    def full_state(self) -> torch.Tensor:
        return self.gathered(torch.float32).cpu().clone()  # leak: the gathered tensor is copied and dropped

    def full_norm(self) -> float:
        full = self.gathered(torch.float32)  # clean: checked in after the norm
        norm = full.norm().item()
        self.cache.checkin(full)
        return norm

    def write_into(self, target: torch.Tensor, strict: bool) -> None:
        full = self.gathered(target.dtype)  # leak: the shape error is raised before the checkin
        if full.numel() != target.numel():
            if strict:
                raise ValueError(f"flat param has {full.numel()} elements, target has {target.numel()}")
            target.view(-1).copy_(full[: target.numel()])
        else:
            target.view(-1).copy_(full)
        self.cache.checkin(full)


class SummonFull:
    """``with SummonFull(handle, writeback=True) as full: ...``"""

    def __init__(self, handle: FlatHandle, writeback: bool = False):
        self.handle = handle
        self.writeback = writeback
        self.full: torch.Tensor | None = None

    def __enter__(self) -> torch.Tensor:
        self.full = self.handle.gathered(self.handle.shard.dtype)  # leak: __exit__ returns before the checkin without writeback
        return self.full

    def __exit__(self, exc_type, exc, tb):
        if exc_type is not None or not self.writeback:
            return False
        rank = dist.get_rank(self.handle.group)
        n = self.handle.shard.numel()
        self.handle.shard.copy_(self.full[rank * n : (rank + 1) * n])
        self.handle.cache.checkin(self.full)
        return False


class PeekShard:
    def __init__(self, handle: FlatHandle):
        self.handle = handle
        self._tmp: torch.Tensor | None = None

    def __enter__(self) -> torch.Tensor:
        self._tmp = self.handle.cache.checkout(self.handle.shard.numel(), torch.float32)  # clean: __exit__ always checks it in
        self._tmp.copy_(self.handle.shard)
        return self._tmp

    def __exit__(self, exc_type, exc, tb):
        self.handle.cache.checkin(self._tmp)
        self._tmp = None
        return exc_type is KeyError


class Prefetcher:
    def __init__(self, handles: Iterable[FlatHandle], cache: GatherCache, depth: int = 2):
        self.handles = list(handles)
        self.cache = cache
        self.depth = depth
        self.ready: dict[int, torch.Tensor] = {}
        self.ahead: dict[int, torch.Tensor] = {}
        for i, h in enumerate(self.handles):
            h.index = i

    def prefetch_from(self, index: int) -> None:
        for i in range(index + 1, min(index + 1 + self.depth, len(self.handles))):
            h = self.handles[i]
            self.ahead[i] = h.gathered(h.shard.dtype)  # leak: replaces an entry prefetched in an earlier step

    def prefetch_missing(self, indices: list[int]) -> None:
        for i in indices:
            if i in self.ready:
                continue
            h = self.handles[i]
            self.ready[i] = h.gathered(h.shard.dtype)  # clean: near miss, only for absent keys; take() or flush() pops it

    def take(self, index: int, fn: Callable[[torch.Tensor], None]) -> bool:
        full = self.ready.pop(index, None)
        if full is None:
            full = self.ahead.pop(index, None)
        if full is None:
            return False
        fn(full)
        self.cache.checkin(full)
        return True

    def flush(self) -> None:
        for full in self.ready.values():
            self.cache.checkin(full)
        self.ready.clear()
        for full in self.ahead.values():
            self.cache.checkin(full)
        self.ahead.clear()


def post_backward(handle: FlatHandle, grad: torch.Tensor) -> None:
    acc = handle.cache.checkout(grad.numel(), torch.float32)  # clean: near miss, the queued callback checks it in
    acc.copy_(grad)

    def _finish() -> None:
        handle.shard.grad = acc.to(handle.shard.dtype)
        handle.cache.checkin(acc)

    Variable._execution_engine.queue_callback(_finish)
