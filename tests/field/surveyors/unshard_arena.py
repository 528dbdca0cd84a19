"""Unsharded parameter storage for fully sharded modules, cut from a shared arena."""
from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Callable, Iterator, Optional

import torch
import torch.distributed as dist


@dataclass
class Span:
    offset: int
    numel: int


class FlatArena:
    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.storage = torch.empty(numel, dtype=dtype, device=device)
        self._holes = [Span(0, numel)]
        self._lock = threading.Lock()

    def carve(self, numel: int) -> Optional[Span]:
        with self._lock:
            for i, hole in enumerate(self._holes):
                if hole.numel < numel:
                    continue
                span = Span(hole.offset, numel)
                hole.offset += numel
                hole.numel -= numel
                if hole.numel == 0:
                    self._holes.pop(i)
                return span
        return None

    def restore(self, span: Span) -> None:
        with self._lock:
            self._holes.append(span)
            self._holes.sort(key=lambda s: s.offset)
            merged: list[Span] = []
            for hole in self._holes:
                if merged and merged[-1].offset + merged[-1].numel == hole.offset:
                    merged[-1].numel += hole.numel
                else:
                    merged.append(Span(hole.offset, hole.numel))
            self._holes = merged

    def carve_aligned(self, numel: int, align: int) -> Optional[Span]:
        span = self.carve(numel + align)  # clean: near miss, the slack at both ends is restored at once
        if span is None:
            return None
        pad = -span.offset % align
        if pad:
            self.restore(Span(span.offset, pad))
        self.restore(Span(span.offset + pad + numel, align - pad))
        return Span(span.offset + pad, numel)

    def view(self, span: Span) -> torch.Tensor:
        return self.storage[span.offset : span.offset + span.numel]


class ParamGroup:
    def __init__(self, arena: FlatArena, shard: torch.Tensor, world: int, reshard_after_forward: bool) -> None:
        self.arena = arena
        self.shard = shard
        self.world = world
        self.reshard_after_forward = reshard_after_forward
        self.unsharded: Optional[Span] = None
        self.grad_span: Optional[Span] = None
        self.prefetched: Optional[Span] = None

    @property
    def full_numel(self) -> int:
        return self.shard.numel() * self.world

    def unshard(self) -> bool:
        if self.unsharded is not None:
            return True
        if self.prefetched is not None:
            self.unsharded, self.prefetched = self.prefetched, None
            return True
        self.unsharded = self.arena.carve(self.full_numel)  # clean: near miss, only while the group is sharded, reshard restores it
        if self.unsharded is None:
            return False
        dist.all_gather_into_tensor(self.arena.view(self.unsharded), self.shard)
        return True

    def prefetch(self) -> bool:
        if self.unsharded is not None:
            return False
        self.prefetched = self.arena.carve(self.full_numel)  # leak: a second prefetch before unshard overwrites the first span
        if self.prefetched is None:
            return False
        dist.all_gather_into_tensor(self.arena.view(self.prefetched), self.shard)
        return True

    def reshard(self) -> None:
        if self.unsharded is not None:
            self.arena.restore(self.unsharded)
            self.unsharded = None
        if self.prefetched is not None:
            self.arena.restore(self.prefetched)
            self.prefetched = None

    def post_forward(self) -> None:
        if self.reshard_after_forward:
            self.reshard()

    def pre_backward(self) -> bool:
        if not self.unshard():  # clean: near miss, post_backward reshards in both modes
            return False
        if self.grad_span is None:
            self.grad_span = self.arena.carve(self.full_numel)  # clean: near miss, taken while the field is empty, post_backward restores it
        return self.grad_span is not None

    def post_backward(self) -> None:
        if self.grad_span is not None:
            grad = self.arena.view(self.grad_span)
            out = torch.empty_like(self.shard)
            dist.reduce_scatter_tensor(out, grad)
            self.shard.grad = out
            self.arena.restore(self.grad_span)
            self.grad_span = None
        self.reshard()

    def full_norm(self) -> Optional[float]:
        fresh = self.unsharded is None
        if not self.unshard():  # clean: near miss, resharded here exactly where this call unsharded it
            return None
        assert self.unsharded is not None
        value = float(self.arena.view(self.unsharded).norm())
        if fresh:
            self.reshard()
        return value

    @contextmanager
    def summon_full(self, writeback: bool) -> Iterator[torch.Tensor]:
        span = self.arena.carve_aligned(self.full_numel, 128)  # leak: restored only with writeback
        if span is None:
            raise MemoryError("arena exhausted")
        full = self.arena.view(span)
        dist.all_gather_into_tensor(full, self.shard)
        try:
            yield full
        finally:
            if writeback:
                rank = dist.get_rank()
                self.shard.copy_(full.chunk(self.world)[rank])
                self.arena.restore(span)


class ShardedModel:
    def __init__(self, arena: FlatArena, groups: list[ParamGroup]) -> None:
        self.arena = arena
        self.groups = groups

    def forward(self, x: torch.Tensor, apply: Callable[[int, torch.Tensor], torch.Tensor]) -> Optional[torch.Tensor]:
        for i, group in enumerate(self.groups):
            if not group.unshard():  # clean: kept until post_forward or post_backward of the group
                return None
            x = apply(i, x)
            group.post_forward()
        return x

    def parameter_sum(self) -> float:
        total = 0.0
        for group in self.groups:
            with group.summon_full(writeback=False) as full:  # leak: without writeback the span stays carved out
                total += float(full.sum())
        return total

    def scale(self, factor: float) -> None:
        for group in self.groups:
            with group.summon_full(writeback=True) as full:  # clean: near miss, with writeback the exit restores the span
                full.mul_(factor)

    def export(self, path: str, limit: int) -> int:
        spans: list[Span] = []
        for group in self.groups:
            span = self.arena.carve(group.full_numel)  # leak: a group over the limit breaks out before its span is listed
            if span is None:
                break
            if sum(s.numel for s in spans) + span.numel > limit:
                break
            dist.all_gather_into_tensor(self.arena.view(span), group.shard)
            spans.append(span)
        torch.save([self.arena.view(span).cpu() for span in spans], path)
        for span in spans:
            self.arena.restore(span)
        return len(spans)

    def compare(self, other: "ShardedModel") -> Optional[bool]:
        same = True
        for mine, theirs in zip(self.groups, other.groups):
            a = self.arena.carve(mine.full_numel)  # clean: near miss, restored when the second carve fails and before the break
            if a is None:
                return None
            b = other.arena.carve(theirs.full_numel)  # clean: restored in the same turn
            if b is None:
                self.arena.restore(a)
                return None
            dist.all_gather_into_tensor(self.arena.view(a), mine.shard)
            dist.all_gather_into_tensor(other.arena.view(b), theirs.shard)
            same = torch.equal(self.arena.view(a), other.arena.view(b))
            self.arena.restore(a)
            other.arena.restore(b)
            if not same:
                break
        return same
