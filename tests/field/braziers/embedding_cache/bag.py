"""Bag lookups over a RowCache."""
from __future__ import annotations

from typing import Mapping, Optional, Sequence

import torch

from .store import PinnedRows, RowCache


class CacheThrash(RuntimeError):
    pass


def require(cache: RowCache, ids: Sequence[int]) -> PinnedRows:
    rows = cache.pin(ids)  # clean: handed to the caller
    if rows is None:
        raise CacheThrash(f"cannot pin {len(ids)} rows at once")
    return rows


def sum_bag(cache: RowCache, ids: Sequence[int]) -> torch.Tensor:
    rows = require(cache, ids)  # clean: unpinned after the reduction
    out = cache.data[list(rows.slots)].sum(0)
    cache.unpin(rows)
    return out


def weighted_bag(cache: RowCache, ids: Sequence[int], weights: Optional[torch.Tensor]) -> torch.Tensor:
    rows = require(cache, ids)  # leak: only the weighted branch unpins
    picked = cache.data[list(rows.slots)]
    if weights is not None:
        out = (picked * weights.unsqueeze(1)).sum(0)
        cache.unpin(rows)
        return out
    return picked.mean(0)


def jagged_lookup(cache: RowCache, values: Sequence[int], offsets: Sequence[int]) -> list[torch.Tensor]:
    out: list[torch.Tensor] = []
    for lo, hi in zip(offsets, offsets[1:]):
        rows = cache.pin(values[lo:hi])  # leak: an all-padding bag continues without unpin
        if rows is None:
            raise CacheThrash("jagged bag does not fit")
        if all(i == 0 for i in rows.ids):
            out.append(torch.zeros(cache.data.shape[1]))
            continue
        out.append(cache.data[list(rows.slots)].mean(0))
        cache.unpin(rows)
    return out


def feature_lookup(cache: RowCache, features: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """All features are pinned together so that none evicts another's rows."""
    held: dict[str, PinnedRows] = {}
    for name, ids in features.items():
        rows = cache.pin(ids)  # clean: near miss, held is drained on both ways out
        if rows is None:
            for other in held.values():
                cache.unpin(other)
            raise CacheThrash(name)
        held[name] = rows
    out = {}
    for name, rows in held.items():
        out[name] = cache.data[list(rows.slots)].sum(0)
        cache.unpin(rows)
    return out


def similarity(cache: RowCache, left: Sequence[int], right: Sequence[int]) -> float:
    a = require(cache, left)  # leak: kept when the right side is empty
    if not right:
        return 0.0
    b = require(cache, right)  # clean: unpinned below
    va = cache.data[list(a.slots)].mean(0)
    vb = cache.data[list(b.slots)].mean(0)
    cache.unpin(b)
    cache.unpin(a)
    return float(torch.dot(va, vb) / (va.norm() * vb.norm() + 1e-6))


class BagSession:
    """Pins one id set for the length of a ``with`` block."""

    def __init__(self, cache: RowCache, ids: Sequence[int]) -> None:
        self._cache = cache
        self._ids = ids
        self._rows: Optional[PinnedRows] = None

    def __enter__(self) -> "BagSession":
        self._rows = require(self._cache, self._ids)  # clean: near miss, unpinned by __exit__
        return self

    def vectors(self) -> torch.Tensor:
        return self._cache.data[list(self._rows.slots)]

    def __exit__(self, *exc) -> None:
        rows, self._rows = self._rows, None
        if rows is not None:
            self._cache.unpin(rows)


class TrainSession(BagSession):
    """Also writes gradients back; sessions without gradients have nothing to write."""

    def __init__(self, cache: RowCache, ids: Sequence[int], lr: float) -> None:
        super().__init__(cache, ids)
        self._lr = lr
        self._state: Optional[PinnedRows] = None
        self.grad: Optional[torch.Tensor] = None

    def __enter__(self) -> "TrainSession":
        super().__enter__()  # clean: near miss, the inherited __exit__ is called first in ours
        self._state = require(self._cache, [i ^ 1 for i in self._ids])  # leak: __exit__ may return early
        return self

    def __exit__(self, *exc) -> None:
        super().__exit__(*exc)
        if self.grad is None:
            return
        self._cache.data[list(self._state.slots)] -= self._lr * self.grad
        self._cache.unpin(self._state)
        self._state = None


def centroid(cache: RowCache, ids: Sequence[int]) -> torch.Tensor:
    with BagSession(cache, ids) as bag:  # clean: with block
        return bag.vectors().mean(0)
