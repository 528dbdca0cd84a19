"""All-reduce fusion buffers: registered regions per group, bucketed gradients."""
from __future__ import annotations

import weakref
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Deque, Optional

import torch
import torch.distributed as dist
import torch.nn as nn


@dataclass(eq=False)
class Region:
    group: str
    flat: torch.Tensor
    offset: int = 0

    def fits(self, n: int) -> bool:
        return self.offset + n <= self.flat.numel()


@dataclass
class Bucket:
    region: Region
    params: list[nn.Parameter] = field(default_factory=list)
    work: Optional[dist.Work] = None


class RegionPool:
    def __init__(self, numel: int, per_group: int, groups: list[str]) -> None:
        self._free: dict[str, Deque[Region]] = defaultdict(deque)
        self._live: "weakref.WeakSet[Region]" = weakref.WeakSet()
        for g in groups:
            for _ in range(per_group):
                self._free[g].append(Region(g, torch.zeros(numel)))

    def register(self, group: str) -> Optional[Region]:
        if not self._free[group]:
            return None
        region = self._free[group].pop()  # clean: returned, _live only counts
        self._live.add(region)
        return region

    def register_two(self, group: str) -> Optional[tuple[Region, Region]]:
        one = self.register(group)  # clean: near miss, deregistered when there is no second
        if one is None:
            return None
        two = self.register(group)  # clean: returned with the first
        if two is None:
            self.deregister(one)
            return None
        return one, two

    def deregister(self, region: Region) -> None:
        region.offset = 0
        self._live.discard(region)
        self._free[region.group].append(region)


class GradReducer:
    def __init__(self, pool: RegionPool, groups: dict[str, dist.ProcessGroup]) -> None:
        self.pool = pool
        self.groups = groups
        self.open: dict[str, Bucket] = {}
        self.launched: list[Bucket] = []

    def _launch(self, bucket: Bucket) -> None:
        used = bucket.region.flat[: bucket.region.offset]
        bucket.work = dist.all_reduce(used, group=self.groups[bucket.region.group], async_op=True)
        self.launched.append(bucket)

    def add(self, group: str, p: nn.Parameter) -> bool:
        if p.grad is None:
            return True
        bucket = self.open.get(group)
        if bucket is not None and not bucket.region.fits(p.numel()):
            self._launch(self.open.pop(group))
            bucket = None
        if bucket is None:
            region = self.pool.register(group)  # clean: near miss, the full bucket went to launched before this one takes its place
            if region is None:
                return False
            bucket = Bucket(region)
            self.open[group] = bucket
        start = bucket.region.offset
        bucket.region.flat[start:start + p.numel()].copy_(p.grad.flatten())
        bucket.region.offset += p.numel()
        bucket.params.append(p)
        return True

    def add_big(self, group: str, p: nn.Parameter) -> bool:
        """One parameter in a bucket of its own."""
        region = self.pool.register(group)  # leak: a parameter larger than a region is refused afterwards
        if region is None or p.grad is None:
            return False
        if not region.fits(p.numel()):
            return False
        region.flat[: p.numel()].copy_(p.grad.flatten())
        region.offset = p.numel()
        self._launch(Bucket(region, [p]))
        return True

    def restart_bucket(self, group: str) -> bool:
        region = self.pool.register(group)  # leak: an open bucket's region is thrown out of the table
        if region is None:
            return False
        self.open[group] = Bucket(region)
        return True

    def finish(self) -> None:
        for group in list(self.open):
            self._launch(self.open.pop(group))
        for bucket in self.launched:
            if bucket.work is not None:
                bucket.work.wait()
            at = 0
            for p in bucket.params:
                p.grad = bucket.region.flat[at:at + p.numel()].view_as(p).clone()
                at += p.numel()
            self.pool.deregister(bucket.region)
        self.launched.clear()


def broadcast_scalar(reducer: GradReducer, group: str, value: float) -> float:
    region = reducer.pool.register(group)  # clean: near miss, both the single-rank answer and the other deregister
    if region is None:
        return value
    region.flat[0] = value
    if dist.get_world_size(reducer.groups[group]) > 1:
        dist.broadcast(region.flat[:1], 0, group=reducer.groups[group])
        value = float(region.flat[0])
    reducer.pool.deregister(region)
    return value


def global_norm(reducer: GradReducer, params: list[nn.Parameter], group: str) -> Optional[float]:
    region = reducer.pool.register(group)  # leak: a missing gradient returns None with the region registered
    if region is None:
        return None
    for i, p in enumerate(params):
        if p.grad is None:
            return None
        region.flat[i] = p.grad.norm() ** 2
    dist.all_reduce(region.flat[: len(params)], group=reducer.groups[group])
    total = float(region.flat[: len(params)].sum()) ** 0.5
    reducer.pool.deregister(region)
    return total


def double_reduce(reducer: GradReducer, group: str, a: torch.Tensor, b: torch.Tensor) -> bool:
    pair = reducer.pool.register_two(group)  # leak: only the first region of the pair is deregistered
    if pair is None:
        return False
    for region, t in zip(pair, (a, b)):
        region.flat[: t.numel()].copy_(t.flatten())
        dist.all_reduce(region.flat[: t.numel()], group=reducer.groups[group])
        t.copy_(region.flat[: t.numel()].view_as(t))
    reducer.pool.deregister(pair[0])
    return True


def latency(reducer: GradReducer, group: str, rounds: int) -> int:
    pair = reducer.pool.register_two(group)  # clean: unpacked, swapped each round and both deregistered
    if pair is None:
        return 0
    ping, pong = pair
    for _ in range(rounds):
        dist.all_reduce(ping.flat[:1], group=reducer.groups[group])
        ping, pong = pong, ping
    reducer.pool.deregister(ping)
    reducer.pool.deregister(pong)
    return rounds


def barrier_all(pool: RegionPool, groups: dict[str, dist.ProcessGroup]) -> list[str]:
    stuck: list[str] = []
    for name, pg in groups.items():
        region = pool.register(name)  # clean: near miss, deregistered before the stuck ones continue
        if region is None:
            continue
        work = dist.all_reduce(region.flat[:1], group=pg, async_op=True)
        ok = work.wait()
        pool.deregister(region)
        if not ok:
            stuck.append(name)
            continue
    return stuck
