"""Gradient buckets in a flat communication arena, with overlapped reduce-scatter."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Extent:
    start: int
    length: int


class FlatArena:
    """First fit over a list of gaps, sorted by start."""

    def __init__(self, numel: int, device: str = "cpu") -> None:
        self.flat = torch.zeros(numel, device=device)
        self.gaps: list[Extent] = [Extent(0, numel)]

    def reserve(self, numel: int) -> Extent | None:
        for i, gap in enumerate(self.gaps):
            if gap.length < numel:
                continue
            if gap.length == numel:
                return self.gaps.pop(i)
            self.gaps[i] = Extent(gap.start + numel, gap.length - numel)
            return Extent(gap.start, numel)
        return None

    def reserve_aligned(self, numel: int, align: int) -> Extent | None:
        ext = self.reserve(numel + align - 1)  # leak: only the aligned part is returned, the padding before and after stays taken
        if ext is None:
            return None
        start = -(-ext.start // align) * align
        return Extent(start, numel)

    def unreserve(self, ext: Extent) -> None:
        merged: list[Extent] = []
        for g in sorted([*self.gaps, ext], key=lambda e: e.start):
            if merged and merged[-1].start + merged[-1].length == g.start:
                merged[-1] = Extent(merged[-1].start, merged[-1].length + g.length)
            else:
                merged.append(g)
        self.gaps = merged

    def view(self, ext: Extent) -> torch.Tensor:
        return self.flat[ext.start : ext.start + ext.length]


@dataclass(eq=False)
class Bucket:
    bucket_id: int
    params: list[torch.nn.Parameter]
    extent: Extent | None = None
    shard: Extent | None = None
    work: Any = None
    ready: set[int] = field(default_factory=set)

    @property
    def numel(self) -> int:
        return sum(p.numel() for p in self.params)


class BucketReducer:
    def __init__(self, buckets: list[Bucket], arena: FlatArena, world: int) -> None:
        self.buckets = {b.bucket_id: b for b in buckets}
        self.arena = arena
        self.world = world
        self.norm_buf: Extent | None = None
        self.overlapped: list[Bucket] = []

    def open_bucket(self, bucket_id: int) -> bool:
        b = self.buckets[bucket_id]
        if b.extent is not None:
            return True
        b.extent = self.arena.reserve(b.numel)  # clean: near miss, only when the bucket has none; finish and reset unreserve it
        return b.extent is not None

    def launch(self, b: Bucket) -> bool:
        if b.work is not None:
            return True
        if not self.open_bucket(b.bucket_id):  # clean: the bucket keeps the extent
            return False
        if b.shard is None:
            b.shard = self.arena.reserve(-(-b.numel // self.world))  # leak: reset gives back only the extent of an unfinished bucket
        if b.shard is None:
            return False
        flat = self.arena.view(b.extent)
        offset = 0
        for p in b.params:
            flat[offset : offset + p.numel()].copy_(p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()))
            offset += p.numel()
        b.work = dist.reduce_scatter_tensor(self.arena.view(b.shard), flat, async_op=True)
        self.overlapped.append(b)
        return True

    def finish(self, b: Bucket) -> torch.Tensor | None:
        if b.work is None:
            return None
        b.work.wait()
        b.work = None
        out = self.arena.view(b.shard).clone()
        self.arena.unreserve(b.shard)
        self.arena.unreserve(b.extent)
        b.shard = b.extent = None
        b.ready.clear()
        self.overlapped.remove(b)
        return out

    def allreduce_coalesced(self, grads: list[torch.Tensor]) -> bool:
        exts: list[Extent] = []
        for g in grads:
            ext = self.arena.reserve(g.numel())  # leak: the extents of the earlier gradients are lost when one does not fit
            if ext is None:
                logger.info("arena is full, %d gradients uncoalesced", len(grads))
                return False
            self.arena.view(ext).copy_(g.flatten())
            exts.append(ext)
        for g, ext in zip(grads, exts):
            dist.all_reduce(self.arena.view(ext))
            g.copy_(self.arena.view(ext).view_as(g))
            self.arena.unreserve(ext)
        return True

    def allreduce_chunked(self, grad: torch.Tensor, chunk: int) -> int:
        flat, done = grad.view(-1), 0
        while done < flat.numel():
            n = min(chunk, flat.numel() - done)
            ext = self.arena.reserve(n)  # clean: near miss, unreserved in each round before the next
            if ext is None:
                break
            tmp = self.arena.view(ext)
            tmp.copy_(flat[done : done + n])
            dist.all_reduce(tmp)
            flat[done : done + n].copy_(tmp)
            self.arena.unreserve(ext)
            done += n
        return done

    def broadcast_params(self, params: list[torch.nn.Parameter], src: int) -> bool:
        total = sum(p.numel() for p in params)
        ext = self.arena.reserve(total)  # clean: near miss, finally unreserves it also after the handled error
        if ext is None:
            return False
        try:
            flat = self.arena.view(ext)
            if dist.get_rank() == src:
                flat.copy_(torch.cat([p.detach().flatten() for p in params]))
            dist.broadcast(flat, src)
            for p, part in zip(params, flat.split([p.numel() for p in params])):
                p.data.copy_(part.view_as(p))
            return True
        except RuntimeError as e:
            logger.error("broadcast failed: %s", e)
            return False
        finally:
            self.arena.unreserve(ext)

    def grad_norm(self, grads: list[torch.Tensor]) -> float:
        if self.norm_buf is None:
            self.norm_buf = self.arena.reserve(1)  # clean: kept for the next steps, reset gives it back
        if self.norm_buf is None:
            return float(torch.stack([g.norm() for g in grads]).norm())
        buf = self.arena.view(self.norm_buf)
        buf[0] = sum(float(g.norm()) ** 2 for g in grads)
        dist.all_reduce(buf)
        return float(buf[0]) ** 0.5

    def all_gather_pair(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        ext_a = self.arena.reserve(a.numel() * self.world)  # clean: near miss, unreserved when the second does not fit
        if ext_a is None:
            return None
        ext_b = self.arena.reserve(b.numel() * self.world)  # leak: the return for a non-finite result gives back only ext_a
        if ext_b is None:
            self.arena.unreserve(ext_a)
            return None
        dist.all_gather_into_tensor(self.arena.view(ext_a), a.flatten())
        dist.all_gather_into_tensor(self.arena.view(ext_b), b.flatten())
        out = self.arena.view(ext_a).clone(), self.arena.view(ext_b).clone()
        self.arena.unreserve(ext_a)
        if not torch.isfinite(out[0]).all():
            logger.warning("non-finite values gathered")
            return None
        self.arena.unreserve(ext_b)
        return out

    def reset(self) -> None:
        for b in self.buckets.values():
            if b.work is not None:
                b.work.wait()
                b.work = None
            if b.extent is not None:
                self.arena.unreserve(b.extent)
            b.extent = b.shard = None
            b.ready.clear()
        self.overlapped.clear()
        if self.norm_buf is not None:
            self.arena.unreserve(self.norm_buf)
            self.norm_buf = None
