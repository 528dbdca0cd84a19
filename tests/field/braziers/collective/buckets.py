"""Gradient buckets reduced while the backward pass runs."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Iterable, Optional

from .comm import Communicator, CommRegistry, Group
from .heap import BestFitPool

log = logging.getLogger(__name__)


@dataclass
class Bucket:
    index: int
    nbytes: int
    addr: Optional[int] = None
    ready: set[str] = field(default_factory=set)
    expected: set[str] = field(default_factory=set)


class BucketReducer:
    """A bucket has memory from its first gradient until it has been reduced."""

    def __init__(self, pool: BestFitPool, group: Group, buckets: list[Bucket]) -> None:
        self._pool = pool
        self._group = group
        self._of = {name: b for b in buckets for name in b.expected}
        self.moved = 0

    def gradient(self, name: str) -> bool:
        bucket = self._of[name]
        if bucket.addr is None:
            bucket.addr = self._pool.get(bucket.nbytes)  # clean: near miss, _reduce puts it back
            if bucket.addr is None:
                return False
        bucket.ready.add(name)
        if bucket.ready == bucket.expected:
            self._reduce(bucket)
        return True

    def _reduce(self, bucket: Bucket) -> None:
        self.moved += self._group.comm.allreduce(bucket.addr, bucket.nbytes)
        self._pool.put(bucket.addr)
        bucket.addr = None
        bucket.ready.clear()


class ShardedReducer:
    """Reduce-scatter variant: an input and an output block for each bucket."""

    def __init__(self, pool: BestFitPool, group: Group) -> None:
        self._pool = pool
        self._group = group
        self._blocks: dict[int, tuple[int, int]] = {}

    def begin(self, bucket: Bucket, world: int) -> bool:
        if bucket.index in self._blocks:
            return True
        full = self._pool.get(bucket.nbytes)  # clean: put back on the failing branch and by end
        if full is None:
            return False
        shard = self._pool.get(bucket.nbytes // world)  # leak: end puts the full block back, not the shard
        if shard is None:
            self._pool.put(full)
            return False
        self._blocks[bucket.index] = (full, shard)
        return True

    def end(self, bucket: Bucket) -> int:
        full, _ = self._blocks.pop(bucket.index)
        moved = self._group.comm.allreduce(full, bucket.nbytes)
        self._pool.put(full)
        return moved


def flatten_once(pool: BestFitPool, comm: Communicator, sizes: Iterable[int]) -> int:
    """Reduce everything through one block that grows when it has to."""
    moved, have, addr = 0, 0, None
    for n in sizes:
        if n > have:
            addr = pool.get(n)  # leak: the smaller block before it is overwritten
            if addr is None:
                break
            have = n
        moved += comm.allreduce(addr, n)
    if addr is not None:
        pool.put(addr)
    return moved


def flatten_growing(pool: BestFitPool, comm: Communicator, sizes: Iterable[int]) -> int:
    moved, have, addr = 0, 0, None
    for n in sizes:
        if n > have:
            if addr is not None:
                pool.put(addr)
            addr = pool.get(n)  # clean: near miss, the block before it was put back
            if addr is None:
                break
            have = n
        moved += comm.allreduce(addr, n)
    if addr is not None:
        pool.put(addr)
    return moved


def broadcast_weights(
    pool: BestFitPool, registry: CommRegistry, ranks: tuple[int, ...], sizes: list[int]
) -> int:
    group = Group(registry, ranks)  # leak: the group is never closed
    staging = pool.get(max(sizes))  # clean: put back at the end
    if staging is None:
        return 0
    moved = sum(group.comm.allreduce(staging, n) for n in sizes)
    pool.put(staging)
    log.info("broadcast of %d tensors moved %d bytes", len(sizes), moved)
    return moved
