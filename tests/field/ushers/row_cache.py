"""Embedding row cache in device memory with pinned rows and write-back leases."""
from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Iterator, Optional, Sequence

import torch

logger = logging.getLogger(__name__)


@dataclass
class CachedRow:
    key: int
    row: int
    pins: int = 0
    dirty: bool = False


class RowAllocator:
    def __init__(self, capacity: int) -> None:
        self._free = list(range(capacity - 1, -1, -1))

    def take_row(self) -> Optional[int]:
        return self._free.pop() if self._free else None

    def return_row(self, row: int) -> None:
        self._free.append(row)


class WriteBackLeases:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.keys: set[int] = set()

    def open_lease(self, key: int) -> bool:
        if key in self.keys or len(self.keys) >= self.limit:
            return False
        self.keys.add(key)
        return True

    def end_lease(self, key: int) -> None:
        self.keys.discard(key)


class RowCache:
    def __init__(self, weights: torch.Tensor, rows: RowAllocator, leases: WriteBackLeases, backing) -> None:
        self.weights = weights
        self.rows = rows
        self.leases = leases
        self.backing = backing
        self._map: OrderedDict[int, CachedRow] = OrderedDict()

    def pin_row(self, key: int) -> Optional[CachedRow]:
        cached = self._map.get(key)
        if cached is None:
            cached = self._load(key)
            if cached is None:
                return None
        self._map.move_to_end(key)
        cached.pins += 1
        return cached

    def unpin_row(self, cached: CachedRow) -> None:
        cached.pins -= 1

    def _load(self, key: int) -> Optional[CachedRow]:
        row = self.rows.take_row()  # leak: a key unknown to the backing store loses its row
        if row is None:
            self.evict(1)
            row = self.rows.take_row()  # leak: the row after eviction is lost likewise
            if row is None:
                return None
        value = self.backing.get(key)
        if value is None:
            return None
        self.weights[row].copy_(value)
        cached = CachedRow(key, row)
        self._map[key] = cached
        return cached

    def insert_zero(self, key: int) -> bool:
        if key in self._map:
            return False
        row = self.rows.take_row()  # clean: near miss, into the map, from where evict returns it
        if row is None:
            return False
        self.weights[row].zero_()
        self._map[key] = CachedRow(key, row, dirty=True)
        return True

    def evict(self, want: int) -> int:
        done = 0
        for key in list(self._map):
            if done == want:
                break
            cached = self._map[key]
            if cached.pins:
                continue
            if cached.dirty and not self._write_back(cached):
                continue
            del self._map[key]
            self.rows.return_row(cached.row)
            done += 1
        return done

    def _write_back(self, cached: CachedRow) -> bool:
        if not self.leases.open_lease(cached.key):  # clean: near miss, ended in both branches
            return False
        try:
            self.backing.put(cached.key, self.weights[cached.row].cpu())
        except OSError:
            self.leases.end_lease(cached.key)
            return False
        self.leases.end_lease(cached.key)
        cached.dirty = False
        return True

    def flush(self) -> int:
        written = 0
        for key, cached in self._map.items():
            if not self.leases.open_lease(key):  # leak: a row that is clean goes on with its lease open
                continue
            if not cached.dirty:
                continue
            self.backing.put(key, self.weights[cached.row].cpu())
            cached.dirty = False
            self.leases.end_lease(key)
            written += 1
        return written


@dataclass
class LookupBatch:
    pinned: list[CachedRow]
    index: torch.Tensor


class CachedEmbedding:
    def __init__(self, cache: RowCache, dim: int) -> None:
        self.cache = cache
        self.dim = dim
        self._hot: dict[int, CachedRow] = {}
        self._ahead: Optional[LookupBatch] = None

    def lookup(self, keys: Sequence[int]) -> Optional[LookupBatch]:
        pinned: list[CachedRow] = []
        for key in keys:
            cached = self.cache.pin_row(key)  # clean: near miss, unpinned upon a miss, else handed on in the batch
            if cached is None:
                for p in pinned:
                    self.cache.unpin_row(p)
                return None
            pinned.append(cached)
        return LookupBatch(pinned, torch.tensor([p.row for p in pinned]))

    def release(self, batch: LookupBatch) -> None:
        for p in batch.pinned:
            self.cache.unpin_row(p)
        batch.pinned = []

    def forward(self, keys: Sequence[int]) -> torch.Tensor:
        batch = self.lookup(keys)  # clean: released after the gather
        if batch is None:
            return torch.zeros(len(keys), self.dim)
        out = self.cache.weights[batch.index].clone()
        self.release(batch)
        return out

    def prefetch(self, keys: Sequence[int]) -> None:
        self._ahead = self.lookup(keys)  # leak: a batch not yet consumed is overwritten with its pins

    def consume(self) -> Optional[torch.Tensor]:
        batch, self._ahead = self._ahead, None
        if batch is None:
            return None
        out = self.cache.weights[batch.index].clone()
        self.release(batch)
        return out

    def mark_hot(self, key: int) -> bool:
        if key in self._hot:
            return True
        cached = self.cache.pin_row(key)  # clean: near miss, kept in _hot until cool
        if cached is None:
            return False
        self._hot[key] = cached
        return True

    def cool(self) -> None:
        for cached in self._hot.values():
            self.cache.unpin_row(cached)
        self._hot.clear()

    def apply_grad(self, key: int, grad: torch.Tensor, lr: float) -> bool:
        cached = self.cache.pin_row(key)  # leak: a gradient that is not finite returns before unpin
        if cached is None:
            return False
        if not torch.isfinite(grad).all():
            return False
        self.cache.weights[cached.row].sub_(grad, alpha=lr)
        cached.dirty = True
        self.cache.unpin_row(cached)
        return True

    def iter_rows(self, keys: Sequence[int]) -> Iterator[torch.Tensor]:
        for key in keys:
            cached = self.cache.pin_row(key)  # clean: unpinned before the row is yielded
            if cached is None:
                continue
            value = self.cache.weights[cached.row].clone()
            self.cache.unpin_row(cached)
            yield value
