"""Embedding rows cached on the device. A pinned row is not evicted until its last pin is undone."""
from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Callable, Iterator

import torch

Loader = Callable[[int], torch.Tensor]


@dataclass
class Row:
    key: int
    slot: int
    pins: int = 0
    dirty: bool = False


class PinCache:
    def __init__(self, capacity: int, dim: int, loader: Loader) -> None:
        self.table = torch.zeros(capacity, dim)
        self._rows: OrderedDict[int, Row] = OrderedDict()
        self._vacant = list(range(capacity))
        self._loader = loader
        self._mu = threading.RLock()

    def _make_room(self) -> int | None:
        if self._vacant:
            return self._vacant.pop()
        for key, row in self._rows.items():
            if row.pins == 0:
                del self._rows[key]
                return row.slot
        return None

    def pin(self, key: int) -> Row | None:
        """The row, pinned once more; None when all slots are pinned by others."""
        with self._mu:
            row = self._rows.get(key)
            if row is None:
                slot = self._make_room()
                if slot is None:
                    return None
                self.table[slot] = self._loader(key)
                row = self._rows[key] = Row(key, slot)
            self._rows.move_to_end(key)
            row.pins += 1
            return row

    def unpin(self, row: Row) -> None:
        with self._mu:
            row.pins -= 1

    def unpin_all(self, rows: list[Row]) -> None:
        for row in rows:
            self.unpin(row)

    @contextlib.contextmanager
    def pinned(self, keys: list[int]) -> Iterator[list[Row]]:
        rows: list[Row] = []
        try:
            for key in keys:
                row = self.pin(key)  # clean: every row appended is unpinned in the finally clause
                if row is not None:
                    rows.append(row)
            yield rows
        finally:
            self.unpin_all(rows)


class PinScope:
    """Explicit scope for the trainer: `add` rows while it is open, all end with it."""

    def __init__(self, cache: PinCache) -> None:
        self.cache = cache
        self.rows: list[Row] = []

    def __enter__(self) -> "PinScope":
        return self

    def add(self, key: int) -> Row | None:
        row = self.cache.pin(key)  # clean: near miss, kept in rows, which __exit__ unpins
        if row is not None:
            self.rows.append(row)
        return row

    def __exit__(self, et, ev, tb) -> None:
        for row in self.rows:
            self.cache.unpin(row)
        self.rows.clear()


class WriteScope:
    """Pins rows for an update; dirty rows are flushed to the parameter server on the way out."""

    def __init__(self, cache: PinCache, flush: Callable[[list[Row]], None]) -> None:
        self.cache = cache
        self.flush = flush
        self.touched: list[Row] = []

    def __enter__(self) -> "WriteScope":
        return self

    def touch(self, key: int, grad: torch.Tensor) -> bool:
        row = self.cache.pin(key)  # leak: __exit__ returns before unpinning when no touched row is dirty
        if row is None:
            return False
        self.touched.append(row)
        if bool(grad.abs().max() > 0):
            self.cache.table[row.slot] -= grad
            row.dirty = True
        return True

    def __exit__(self, et, ev, tb) -> None:
        dirty = [r for r in self.touched if r.dirty]
        if not dirty:
            return
        self.flush(dirty)
        for row in self.touched:
            row.dirty = False
            self.cache.unpin(row)
        self.touched.clear()


@dataclass
class BagRequest:
    ids: list[int]
    weights: list[float]
    held: dict[int, Row] = field(default_factory=dict)


class BagServer:
    def __init__(self, cache: PinCache) -> None:
        self.cache = cache
        self.hot: dict[int, Row] = {}
        self.misses = 0

    def pooled(self, req: BagRequest) -> torch.Tensor:
        with self.cache.pinned(req.ids) as rows:  # clean: context manager
            slots = torch.tensor([r.slot for r in rows], dtype=torch.long)
            return self.cache.table[slots].sum(0)

    def weighted(self, req: BagRequest) -> torch.Tensor | None:
        total = torch.zeros(self.cache.table.shape[1])
        for key, w in zip(req.ids, req.weights):
            row = self.cache.pin(key)  # clean: unpinned in the same round
            if row is None:
                self.misses += 1
                continue
            total += w * self.cache.table[row.slot]
            self.cache.unpin(row)
        return total

    def weighted_strict(self, req: BagRequest) -> torch.Tensor | None:
        rows: list[Row] = []
        for key in req.ids:
            row = self.cache.pin(key)  # leak: one miss returns None with the rows before it still pinned
            if row is None:
                self.misses += 1
                return None
            rows.append(row)
        slots = torch.tensor([r.slot for r in rows], dtype=torch.long)
        out = (self.cache.table[slots] * torch.tensor(req.weights).unsqueeze(1)).sum(0)
        self.cache.unpin_all(rows)
        return out

    def begin(self, req: BagRequest) -> dict[int, int]:
        """Pins the bag until `end`; ids repeat, the count per id is what the kernel wants."""
        counts: dict[int, int] = {}
        for key in req.ids:
            counts[key] = counts.get(key, 0) + 1
            row = self.cache.pin(key)  # leak: a repeated id is pinned again, the dict has one entry to unpin
            if row is not None:
                req.held[key] = row
        return counts

    def begin_unique(self, req: BagRequest) -> None:
        for key in set(req.ids):
            if key in req.held:
                continue
            row = self.cache.pin(key)  # clean: near miss, one pin per key, end unpins held
            if row is not None:
                req.held[key] = row

    def end(self, req: BagRequest) -> None:
        self.cache.unpin_all(list(req.held.values()))
        req.held.clear()

    def set_hot(self, keys: list[int]) -> None:
        """Keeps the given keys resident until the next call."""
        fresh: dict[int, Row] = {}
        for key in keys:
            if key in self.hot:
                fresh[key] = self.hot.pop(key)
            elif key not in fresh:
                row = self.cache.pin(key)  # clean: moved to hot, left over rows of the last set are unpinned
                if row is not None:
                    fresh[key] = row
        self.cache.unpin_all(list(self.hot.values()))
        self.hot = fresh

    def close(self) -> None:
        while self.hot:
            _, row = self.hot.popitem()
            self.cache.unpin(row)


def train_step(cache: PinCache, grads: dict[int, torch.Tensor], flush: Callable) -> int:
    done = 0
    with WriteScope(cache, flush) as scope:  # clean: the scope itself takes nothing on entry
        for key, grad in grads.items():
            done += scope.touch(key, grad)
    return done


def neighbours(cache: PinCache, key: int, edges: dict[int, list[int]]) -> torch.Tensor:
    with PinScope(cache) as scope:  # clean: near miss, takes nothing itself, __exit__ unpins what add kept
        centre = scope.add(key)  # clean: near miss, the scope unpins it
        if centre is None:
            return torch.zeros(0)
        rows = [centre]
        for other in edges.get(key, []):
            row = scope.add(other)  # clean: near miss, the scope unpins it
            if row is not None:
                rows.append(row)
        return cache.table[[r.slot for r in rows]].clone()


def is_resident(cache: PinCache, key: int) -> bool:
    return cache.pin(key) is not None  # leak: a probe that pins the row for good


def copy_row(cache: PinCache, key: int, out: torch.Tensor) -> bool:
    row = cache.pin(key)  # leak: the row with NaN is reported and stays pinned
    if row is None:
        return False
    vec = cache.table[row.slot]
    if torch.isnan(vec).any():
        return False
    out.copy_(vec)
    cache.unpin(row)
    return True
