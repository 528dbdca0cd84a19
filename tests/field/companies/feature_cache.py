"""Feature cache with pinned rows for recommender training."""
from collections import OrderedDict
from typing import Dict, Hashable, List, Optional, Sequence

import torch


class RowStore:
    def __init__(self, rows: int, dim: int) -> None:
        self.table = torch.zeros(rows, dim)
        self._bitmap = [0] * rows

    def alloc_row(self) -> int:
        for i, used in enumerate(self._bitmap):
            if not used:
                self._bitmap[i] = 1
                return i
        return -1

    def dealloc_row(self, i: int) -> None:
        self._bitmap[i] = 0


class FeatureCache:
    def __init__(self, store: RowStore) -> None:
        self.store = store
        self._rows: "OrderedDict[Hashable, int]" = OrderedDict()
        self._pins: Dict[Hashable, int] = {}

    # -- pins ---------------------------------------------------------
    def pin(self, key: Hashable) -> bool:
        if key not in self._rows:
            return False
        self._pins[key] = self._pins.get(key, 0) + 1
        return True

    def unpin(self, key: Hashable) -> None:
        n = self._pins[key] - 1
        if n:
            self._pins[key] = n
        else:
            del self._pins[key]

    # -- rows ---------------------------------------------------------
    def insert(self, key: Hashable, value: torch.Tensor) -> bool:
        if key in self._rows:
            self.store.table[self._rows[key]].copy_(value)
            return True
        row = self.store.alloc_row()  # clean: near miss, -1 takes nothing and evicting makes room
        if row < 0:
            if not self._evict_one():
                return False
            row = self.store.alloc_row()  # clean: stored in the table, eviction deallocates
        self.store.table[row].copy_(value)
        self._rows[key] = row
        return True

    def add_new(self, key: Hashable, value: torch.Tensor) -> None:
        row = self.store.alloc_row()  # leak: the raise for a known key loses the new row
        if row < 0:
            raise MemoryError("no rows")
        if key in self._rows:
            raise KeyError(key)
        self.store.table[row].copy_(value)
        self._rows[key] = row

    def move(self, key: Hashable) -> bool:
        fresh = self.store.alloc_row()  # clean: near miss, given back when the key is unknown and swapped otherwise
        if fresh < 0:
            return False
        old = self._rows.get(key)
        if old is None:
            self.store.dealloc_row(fresh)
            return False
        self.store.table[fresh].copy_(self.store.table[old])
        self._rows[key] = fresh
        self.store.dealloc_row(old)
        return True

    def _evict_one(self) -> bool:
        for key in list(self._rows):
            if key not in self._pins:
                self.store.dealloc_row(self._rows.pop(key))
                return True
        return False

    def flush(self) -> None:
        for row in self._rows.values():
            self.store.dealloc_row(row)
        self._rows.clear()

    # -- users --------------------------------------------------------
    def lookup(self, key: Hashable) -> Optional[torch.Tensor]:
        if not self.pin(key):  # clean: near miss, a False pin takes nothing
            return None
        out = self.store.table[self._rows[key]].clone()
        self.unpin(key)
        return out

    def gather(self, keys: Sequence[Hashable]) -> Optional[torch.Tensor]:
        rows: List[int] = []
        for k in keys:
            if not self.pin(k):  # leak: a miss returns while the keys before it stay pinned
                return None
            rows.append(self._rows[k])
        out = self.store.table[rows]
        for k in keys:
            self.unpin(k)
        return out

    def gather_or_skip(self, keys: Sequence[Hashable]) -> torch.Tensor:
        held = [k for k in keys if self.pin(k)]  # clean: near miss, only those that were pinned are in the list
        out = self.store.table[[self._rows[k] for k in held]].sum(0)
        for k in held:
            self.unpin(k)
        return out

    def mean_nonzero(self, keys: Sequence[Hashable]) -> float:
        total, n = 0.0, 0
        for k in keys:
            if not self.pin(k):  # leak: an all-zero row continues with its pin
                continue
            row = self.store.table[self._rows[k]]
            if not row.any():
                continue
            total += float(row.mean())
            n += 1
            self.unpin(k)
        return total / max(n, 1)

    def dot(self, a: Hashable, b: Hashable) -> float:
        if not self.pin(a):  # leak: stays pinned when b is not there
            return 0.0
        if not self.pin(b):  # clean: unpinned at the end
            return 0.0
        value = float(self.store.table[self._rows[a]] @ self.store.table[self._rows[b]])
        self.unpin(b)
        self.unpin(a)
        return value

    def similarity(self, a: Hashable, b: Hashable) -> float:
        if not self.pin(a):  # clean: near miss, unpinned where b misses
            return 0.0
        if not self.pin(b):  # clean: unpinned at the end
            self.unpin(a)
            return 0.0
        value = float(self.store.table[self._rows[a]] @ self.store.table[self._rows[b]])
        self.unpin(b)
        self.unpin(a)
        return value


class PinnedBatch:
    """Pins for the duration of a step."""

    def __init__(self, cache: FeatureCache, keys: Sequence[Hashable]):
        self.cache = cache
        self.keys = list(keys)
        self.held: List[Hashable] = []

    def __enter__(self) -> "PinnedBatch":
        for k in self.keys:
            if self.cache.pin(k):  # leak: __exit__ unpins all but the first
                self.held.append(k)
        return self

    def __exit__(self, *exc) -> None:
        for k in self.held[1:]:
            self.cache.unpin(k)
        self.held.clear()
