from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Iterable, Iterator

import numpy as np
import torch


class RowSlots:
    """Slots of a device-side embedding cache."""

    def __init__(self, rows: int, dim: int, device: str = "cuda") -> None:
        self.table = torch.zeros(rows, dim, device=device)
        self._free: list[int] = list(range(rows))

    def __len__(self) -> int:
        return len(self._free)

    def claim(self) -> int | None:
        return self._free.pop() if self._free else None

    def claim_many(self, n: int) -> list[int]:
        if n > len(self._free):
            return []
        taken, self._free = self._free[-n:], self._free[:-n]
        return taken

    def vacate(self, slot: int) -> None:
        self._free.append(slot)

    def vacate_many(self, slots: Iterable[int]) -> None:
        self._free.extend(slots)


@dataclass
class Shard:
    path: str
    dim: int
    fd: int = -1
    view: mmap.mmap | None = None
    users: int = 0

    def rows(self) -> np.ndarray:
        return np.frombuffer(self.view, dtype=np.float32).reshape(-1, self.dim)


class ShardSet:
    def __init__(self, paths: list[str], dim: int) -> None:
        self._shards = [Shard(p, dim) for p in paths]

    def attach(self, i: int) -> Shard | None:
        shard = self._shards[i]
        if shard.users == 0:
            try:
                fd = os.open(shard.path, os.O_RDONLY)  # leak: an empty file returns without closing the descriptor
            except FileNotFoundError:
                return None
            if os.fstat(fd).st_size == 0:
                return None
            shard.fd = fd
            shard.view = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)  # clean: closed in detach with the last user
        shard.users += 1
        return shard

    def detach(self, shard: Shard) -> None:
        shard.users -= 1
        if shard.users == 0 and shard.view is not None:
            shard.view.close()
            os.close(shard.fd)
            shard.view, shard.fd = None, -1

    def shard_of(self, key: int) -> tuple[int, int]:
        return key % len(self._shards), key // len(self._shards)


@dataclass
class EmbeddingCache:
    slots: RowSlots
    shards: ShardSet
    _index: OrderedDict[int, int] = field(default_factory=OrderedDict)
    _dirty: set[int] = field(default_factory=set)

    def _read(self, key: int) -> torch.Tensor | None:
        which, row = self.shards.shard_of(key)
        shard = self.shards.attach(which)  # leak: an out-of-range row returns None without detach
        if shard is None:
            return None
        rows = shard.rows()
        if row >= len(rows):
            return None
        value = torch.from_numpy(rows[row].copy())
        del rows
        self.shards.detach(shard)
        return value

    def _evict_one(self) -> bool:
        for key, slot in self._index.items():
            if key not in self._dirty:
                break
        else:
            return False
        del self._index[key]
        self.slots.vacate(slot)
        return True

    def lookup(self, key: int) -> int | None:
        if key in self._index:
            self._index.move_to_end(key)
            return self._index[key]
        value = self._read(key)
        if value is None:
            return None
        slot = self.slots.claim()  # clean: near miss, a None here is replaced after eviction; kept in the index
        if slot is None and self._evict_one():
            slot = self.slots.claim()  # clean: kept in the index, vacated upon eviction
        if slot is None:
            return None
        self.slots.table[slot].copy_(value)
        self._index[key] = slot
        return slot

    def write(self, key: int, value: torch.Tensor) -> bool:
        slot = self.slots.claim()  # leak: a key already resident has its old slot overwritten in the index
        if slot is None:
            return False
        self.slots.table[slot].copy_(value)
        self._index[key] = slot
        self._dirty.add(key)
        return True

    def prefetch(self, keys: list[int]) -> int:
        missing = list(dict.fromkeys(k for k in keys if k not in self._index))
        got = self.slots.claim_many(len(missing))  # clean: near miss, unread ones are collected and vacated
        spare: list[int] = []
        loaded = 0
        for key, slot in zip(missing, got):
            value = self._read(key)
            if value is None:
                spare.append(slot)
                continue
            self.slots.table[slot].copy_(value)
            self._index[key] = slot
            loaded += 1
        self.slots.vacate_many(spare)
        return loaded

    def invalidate(self, keys: Iterable[int]) -> None:
        for key in keys:
            slot = self._index.pop(key, None)
            if slot is not None:
                self._dirty.discard(key)
                self.slots.vacate(slot)

    def pooled(self, bags: list[list[int]]) -> torch.Tensor | None:
        scratch = self.slots.claim_many(len(bags))  # clean: vacated after the copy out
        if not scratch:
            return None
        for slot, bag in zip(scratch, bags):
            hit = [s for s in (self.lookup(k) for k in bag) if s is not None]
            if hit:
                self.slots.table[slot] = self.slots.table[hit].sum(0)
            else:
                self.slots.table[slot].zero_()
        out = self.slots.table[scratch].clone()
        self.slots.vacate_many(scratch)
        return out


def scan(shards: ShardSet, count: int) -> Iterator[np.ndarray]:
    for i in range(count):
        shard = shards.attach(i)  # clean: near miss, the generator detaches also when it is closed early
        if shard is None:
            continue
        try:
            yield shard.rows().copy()
        finally:
            shards.detach(shard)


def swap_rows(cache: EmbeddingCache, a: int, b: int) -> bool:
    tmp = cache.slots.claim()  # leak: absent keys return False with the temporary slot still claimed
    if tmp is None:
        return False
    sa, sb = cache.lookup(a), cache.lookup(b)
    if sa is None or sb is None:
        return False
    table = cache.slots.table
    table[tmp].copy_(table[sa])
    table[sa].copy_(table[sb])
    table[sb].copy_(table[tmp])
    cache.slots.vacate(tmp)
    return True
