"""Gradient reduction: buckets from a buffer pool, communicators shared by count."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
import torch.distributed as dist


class BucketPool:
    def __init__(self, numel: int) -> None:
        self.numel = numel
        self._spare: list[torch.Tensor] = []

    def checkout(self) -> torch.Tensor:
        return self._spare.pop() if self._spare else torch.zeros(self.numel)

    def checkin(self, flat: torch.Tensor) -> None:
        flat.zero_()
        self._spare.append(flat)


class CommRegistry:
    """Communicators by group name, destroyed when the last user is gone."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}
        self._groups: dict[str, object] = {}

    def retain(self, name: str, ranks: tuple[int, ...]):
        if name not in self._groups:
            self._groups[name] = dist.new_group(list(ranks))
        self._count[name] = self._count.get(name, 0) + 1
        return self._groups[name]

    def discard(self, name: str) -> None:
        self._count[name] -= 1
        if self._count[name] == 0:
            del self._count[name]
            dist.destroy_process_group(self._groups.pop(name))


@dataclass
class Bucket:
    flat: torch.Tensor
    params: list[torch.nn.Parameter] = field(default_factory=list)
    filled: int = 0
    ready: bool = False


class Reducer:
    def __init__(self, pool: BucketPool, group) -> None:
        self.pool = pool
        self.group = group
        self.buckets: list[Bucket] = []
        self.tail: deque[Bucket] = deque()

    def add(self, param: torch.nn.Parameter) -> None:
        if not self.buckets or self.buckets[-1].filled + param.numel() > self.pool.numel:
            self.buckets.append(Bucket(self.pool.checkout()))  # leak: step drops those not ready
        bucket = self.buckets[-1]
        bucket.params.append(param)
        bucket.filled += param.numel()

    def mark_ready(self, index: int) -> None:
        self.buckets[index].ready = True

    def step(self) -> int:
        reduced = 0
        for bucket in self.buckets:
            if bucket.ready:
                dist.all_reduce(bucket.flat, group=self.group)
                reduced += bucket.filled
                self.pool.checkin(bucket.flat)
        self.buckets.clear()
        return reduced

    def add_tail(self, param: torch.nn.Parameter) -> None:
        bucket = Bucket(self.pool.checkout(), [param], param.numel())  # clean: near miss, queued again until ready
        self.tail.append(bucket)

    def step_tail(self) -> int:
        reduced = 0
        for _ in range(len(self.tail)):
            bucket = self.tail.popleft()
            if not bucket.ready:
                bucket.ready = True
                self.tail.append(bucket)
                continue
            dist.all_reduce(bucket.flat, group=self.group)
            reduced += bucket.filled
            self.pool.checkin(bucket.flat)
        return reduced


def reduce_coalesced(pool: BucketPool, tensors: list[torch.Tensor], group) -> list[torch.Tensor]:
    flats = []
    for t in tensors:
        flat = pool.checkout()  # leak: only the first is checked in
        flat[: t.numel()].copy_(t.reshape(-1))
        flats.append(flat)
    work = [dist.all_reduce(f, group=group, async_op=True) for f in flats]
    for w in work:
        w.wait()
    out = [f[: t.numel()].reshape(t.shape).clone() for f, t in zip(flats, tensors)]
    if flats:
        pool.checkin(flats[0])
    return out


def reduce_each(pool: BucketPool, tensors: list[torch.Tensor], group) -> list[torch.Tensor]:
    flats = [pool.checkout() for _ in tensors]  # clean: near miss, first and others are checked in apart
    for flat, t in zip(flats, tensors):
        flat[: t.numel()].copy_(t.reshape(-1))
        dist.all_reduce(flat, group=group)
    out = [f[: t.numel()].reshape(t.shape).clone() for f, t in zip(flats, tensors)]
    if not flats:
        return out
    pool.checkin(flats[0])
    for flat in flats[1:]:
        pool.checkin(flat)
    return out


def clip_by_norm(pool: BucketPool, grads: list[torch.Tensor], limit: float) -> float:
    flat = pool.checkout()  # leak: checked in only where the gradients were clipped
    pos = 0
    for g in grads:
        flat[pos:pos + g.numel()].copy_(g.reshape(-1))
        pos += g.numel()
    norm = flat[:pos].norm().item()
    if norm > limit:
        for g in grads:
            g.mul_(limit / norm)
        pool.checkin(flat)
    return norm


def scale_by_norm(pool: BucketPool, grads: list[torch.Tensor], limit: float) -> float:
    flat = pool.checkout()  # clean: near miss, the scaling is conditional, the checkin is not
    pos = 0
    for g in grads:
        flat[pos:pos + g.numel()].copy_(g.reshape(-1))
        pos += g.numel()
    norm = flat[:pos].norm().item()
    pool.checkin(flat)
    if norm <= limit:
        return norm
    for g in grads:
        g.mul_(limit / norm)
    return limit


class ParallelGroups:
    """Holds tensor-parallel and data-parallel communicators for one model."""

    def __init__(self, registry: CommRegistry, tp: tuple[int, ...], dp: tuple[int, ...]) -> None:
        self.registry = registry
        self.tp = registry.retain("tp", tp)  # clean: shutdown discards it
        self.dp = registry.retain("dp", dp)  # leak: shutdown returns before it where tp spans one rank
        self.tp_size = len(tp)

    def shutdown(self) -> None:
        self.registry.discard("tp")
        if self.tp_size == 1:
            return
        self.registry.discard("dp")


class ExpertGroups:
    def __init__(self, registry: CommRegistry, ranks: dict[str, tuple[int, ...]]) -> None:
        self.registry = registry
        self.ranks = ranks
        self.groups = {name: registry.retain(name, r) for name, r in ranks.items()}  # clean: shutdown walks all names

    def shutdown(self) -> None:
        for name in self.ranks:
            self.registry.discard(name)
        self.groups.clear()
