"""Flat gradient buckets for overlapped all-reduce.

Parameters are packed in reverse order of registration; a bucket is reduced when
its last gradient has arrived.  Flat storage is recycled between steps.
"""
from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist

Key = Tuple[int, torch.dtype]


class FlatStore:
    """Flat tensors cached by (numel, dtype)."""

    def __init__(self, device: torch.device, max_live: int = 64) -> None:
        self.device = device
        self.max_live = max_live
        self._idle: Dict[Key, List[torch.Tensor]] = {}
        self.live = 0

    def borrow(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        shelf = self._idle.setdefault((numel, dtype), [])
        self.live += 1
        if shelf:
            return shelf.pop()  # clean: handed to the caller
        return torch.empty(numel, dtype=dtype, device=self.device)

    def borrow_or_none(self, numel: int, dtype: torch.dtype) -> Optional[torch.Tensor]:
        if self.live >= self.max_live:
            return None
        return self.borrow(numel, dtype)  # clean: handed to the caller

    def give(self, t: torch.Tensor) -> None:
        self.live -= 1
        self._idle.setdefault((t.numel(), t.dtype), []).append(t)

    @contextmanager
    def scratch(self, numel: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        t = self.borrow(numel, dtype)  # clean: given back in finally
        try:
            yield t
        finally:
            self.give(t)


@dataclass
class Bucket:
    index: int
    params: List[torch.nn.Parameter]
    numel: int
    dtype: torch.dtype
    flat: Optional[torch.Tensor] = None
    pending: int = 0
    work: Optional[dist.Work] = None
    offsets: List[int] = field(default_factory=list)


def pack_fp32(store: FlatStore, grads: List[torch.Tensor]) -> torch.Tensor:
    n = sum(g.numel() for g in grads)
    out = store.borrow(n, torch.float32)  # clean: handed to the caller
    o = 0
    for g in grads:
        out[o : o + g.numel()].copy_(g.flatten())
        o += g.numel()
    return out


class BucketReducer:
    def __init__(self, store: FlatStore, buckets: List[Bucket], compress: bool = False) -> None:
        self.store = store
        self.buckets = buckets
        self.compress = compress
        self._residual: Dict[int, torch.Tensor] = {}
        self._skipped = 0

    # -- per step ---------------------------------------------------------

    def arm(self) -> None:
        for b in self.buckets:
            if b.flat is None:
                b.flat = self.store.borrow(b.numel, b.dtype)  # leak: rearm_after_overflow() replaces it in the bucket without a give
            b.pending = len(b.params)
            b.work = None

    def rearm_after_overflow(self) -> None:
        """A step whose grads overflowed is thrown away, the buckets start again."""
        for b in self.buckets:
            b.flat = self.store.borrow(b.numel, b.dtype)  # leak: a second overflow in a row replaces it without a give
            b.pending = len(b.params)
        self._skipped += 1

    def ready(self, b: Bucket, slot: int, grad: torch.Tensor) -> None:
        o = b.offsets[slot]
        b.flat[o : o + grad.numel()].copy_(grad.flatten())
        b.pending -= 1
        if b.pending == 0:
            b.work = dist.all_reduce(b.flat, async_op=True)

    def drain(self) -> None:
        for b in self.buckets:
            if b.work is not None:
                b.work.wait()
            if b.flat is None:
                continue
            world = dist.get_world_size()
            for p, o in zip(b.params, b.offsets):
                p.grad.copy_(b.flat[o : o + p.numel()].view_as(p)).div_(world)
            self.store.give(b.flat)
            b.flat = None

    # -- norms ------------------------------------------------------------

    def global_norm(self, grads: List[torch.Tensor]) -> float:
        flat = pack_fp32(self.store, grads)  # clean: given back before the reduction
        sq = flat.dot(flat)
        self.store.give(flat)
        dist.all_reduce(sq)
        return float(sq.sqrt())

    def local_absmax(self, grads: List[torch.Tensor]) -> float:
        return pack_fp32(self.store, grads).abs().max().item()  # leak: the pooled flat is a temporary nobody gives back

    def snapshot(self, grads: List[torch.Tensor]) -> torch.Tensor:
        flat = pack_fp32(self.store, grads)  # leak: cloned and dropped
        return flat.clone()

    # -- compression ------------------------------------------------------

    def reduce_compressed(self, b: Bucket) -> None:
        half = self.store.borrow(b.numel, torch.bfloat16)  # clean: given back at the end
        err = None
        if self.compress:
            err = self.store.borrow(b.numel, torch.float32)  # clean: near miss, same flag guards the give
            err.copy_(b.flat)
        half.copy_(b.flat)
        dist.all_reduce(half)
        if self.compress:
            err.sub_(half.float())
            b.flat.add_(err)
            self.store.give(err)
        b.flat.copy_(half)
        self.store.give(half)

    def feed_back(self, b: Bucket) -> None:
        """Error feedback: adds what was lost to rounding at the last step."""
        new = self.store.borrow(b.numel, torch.float32)  # clean: near miss, kept in _residual, which gives the old one back first and is emptied by reset()
        new.copy_(b.flat).sub_(b.flat.to(torch.bfloat16).float())
        old = self._residual.pop(b.index, None)
        if old is not None:
            b.flat.add_(old.to(b.dtype))
            self.store.give(old)
        self._residual[b.index] = new

    def reset(self) -> None:
        while self._residual:
            _, t = self._residual.popitem()
            self.store.give(t)

    def topk(self, b: Bucket, k: int) -> Optional[Tuple[torch.Tensor, torch.Tensor]]:
        mag = self.store.borrow_or_none(b.numel, torch.float32)  # leak: not given back when k covers the whole bucket
        if mag is None:
            return None
        torch.abs(b.flat.float(), out=mag)
        if k >= b.numel:
            return b.flat, torch.arange(b.numel, device=b.flat.device)
        vals, idx = mag.topk(k)
        self.store.give(mag)
        return vals.clone(), idx

    def compare(self, b: Bucket, ref: torch.Tensor) -> float:
        with self.store.scratch(b.numel, torch.float32) as diff:  # clean: context manager gives it back on return
            if ref.numel() != b.numel:
                return float("inf")
            torch.sub(b.flat.float(), ref, out=diff)
            return float(diff.abs().max())

    def hierarchical(self, b: Bucket, intra: dist.ProcessGroup, inter: Optional[dist.ProcessGroup]) -> None:
        world = dist.get_world_size(intra)
        shard = self.store.borrow(b.numel // world, b.dtype)  # leak: kept when there is no inter-node group
        dist.reduce_scatter_tensor(shard, b.flat, group=intra)
        if inter is None:
            dist.all_gather_into_tensor(b.flat, shard, group=intra)
            return
        dist.all_reduce(shard, group=inter)
        dist.all_gather_into_tensor(b.flat, shard, group=intra)
        self.store.give(shard)


def accumulate(store: FlatStore, micro: List[List[torch.Tensor]]) -> Optional[torch.Tensor]:
    """Sums packed micro-batch gradients; the result belongs to the caller."""
    total = None
    for grads in micro:
        flat = pack_fp32(store, grads)  # clean: near miss, the first becomes the total and each later one is given back
        if total is None:
            total = flat
        else:
            total.add_(flat)
            store.give(flat)
    return total


def accumulate_latest(store: FlatStore, micro: List[List[torch.Tensor]]) -> torch.Tensor:
    best = store.borrow(1, torch.float32)  # leak: lost when best is rebound to a packed gradient
    score = -1.0
    for grads in micro:
        flat = pack_fp32(store, grads)  # leak: the former best is lost when a better one replaces it
        s = float(flat.norm())
        if s > score:
            best, score = flat, s
        else:
            store.give(flat)
    return best


def step_norms(store: FlatStore, micro: List[List[torch.Tensor]]) -> float:
    total = accumulate(store, micro)  # clean: None when there are no micro-batches, else given back
    if total is None:
        return 0.0
    n = float(total.norm())
    store.give(total)
    return n
