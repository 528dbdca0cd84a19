"""Device-resident cache of embedding rows in front of a host-side table."""
from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from typing import Iterable, List, Mapping, Optional, Sequence

log = logging.getLogger(__name__)


class HostTable:
    """Rows by id; absent ids are cold and served by the default vector."""

    def __init__(self, rows: Mapping[int, Sequence[float]], dim: int) -> None:
        self._rows = {k: list(v) for k, v in rows.items()}
        self.dim = dim

    def fetch(self, key: int) -> Optional[List[float]]:
        return self._rows.get(key)

    def store(self, key: int, row: Sequence[float]) -> None:
        self._rows[key] = list(row)


class RowSlots:
    """Fixed number of row-sized slots in one device allocation."""

    def __init__(self, count: int, dim: int) -> None:
        self._lock = threading.Lock()
        self._free = list(range(count))
        self.rows: List[List[float]] = [[0.0] * dim for _ in range(count)]

    def claim(self) -> Optional[int]:
        with self._lock:
            if not self._free:
                return None
            return self._free.pop()

    def surrender(self, slot: int) -> None:
        with self._lock:
            self._free.append(slot)

    def available(self) -> int:
        with self._lock:
            return len(self._free)


class EmbeddingCache:
    def __init__(self, host: HostTable, capacity: int) -> None:
        self.host = host
        self.slots = RowSlots(capacity, host.dim)
        self._index: "OrderedDict[int, int]" = OrderedDict()
        self._probe: Optional[int] = None
        self.misses = 0

    def _evict_one(self) -> bool:
        if not self._index:
            return False
        _, slot = self._index.popitem(last=False)
        self.slots.surrender(slot)
        return True

    def _claim_or_evict(self) -> Optional[int]:
        slot = self.slots.claim()  # clean: near miss, rebound only when it is None
        if slot is None and self._evict_one():
            slot = self.slots.claim()  # clean: returned to the caller
        return slot

    def get(self, key: int) -> Optional[List[float]]:
        slot = self._index.get(key)
        if slot is not None:
            self._index.move_to_end(key)
            return self.slots.rows[slot]
        row = self.host.fetch(key)
        if row is None:
            self.misses += 1
            return None
        slot = self._claim_or_evict()  # clean: stored in the index, surrendered by eviction
        if slot is None:
            return row
        self.slots.rows[slot][:] = row
        self._index[key] = slot
        return self.slots.rows[slot]

    def prefetch(self, keys: Iterable[int]) -> int:
        loaded = 0
        for key in keys:
            if key in self._index:
                continue
            slot = self._claim_or_evict()  # leak: continue on a host miss skips the surrender
            if slot is None:
                break
            row = self.host.fetch(key)
            if row is None:
                self.misses += 1
                continue
            self.slots.rows[slot][:] = row
            self._index[key] = slot
            loaded += 1
        return loaded

    def warm(self, rows: Mapping[int, Sequence[float]]) -> None:
        for key, row in rows.items():
            stale = self._index.pop(key, None)
            if stale is not None:
                self.slots.surrender(stale)
            slot = self._claim_or_evict()  # clean: near miss, the old entry was taken out and surrendered before
            if slot is None:
                log.info("cache full, stopped warming at %d", key)
                return
            self.slots.rows[slot][:] = row
            self._index[key] = slot

    def apply_deltas(self, deltas: Mapping[int, Sequence[float]]) -> int:
        """Accumulate each delta in a scratch slot and write the row back."""
        scratch = self.slots.claim()  # leak: return 0 when no row is resident
        if scratch is None:
            raise RuntimeError("no scratch row")
        resident = [k for k in deltas if k in self._index]
        if not resident:
            return 0
        acc = self.slots.rows[scratch]
        for key in resident:
            row = self.slots.rows[self._index[key]]
            acc[:] = [a + d for a, d in zip(row, deltas[key])]
            row[:] = acc
            self.host.store(key, acc)
        self.slots.surrender(scratch)
        return len(resident)

    def exchange(self, a: int, b: int) -> bool:
        """Swap two resident rows through scratch slots."""
        if a not in self._index or b not in self._index:
            return False
        left = self.slots.claim()  # leak: not given back when the second claim fails
        if left is None:
            return False
        right = self.slots.claim()  # clean: surrendered with left below
        if right is None:
            return False
        rows = self.slots.rows
        rows[left][:] = rows[self._index[a]]
        rows[right][:] = rows[self._index[b]]
        rows[self._index[a]][:] = rows[right]
        rows[self._index[b]][:] = rows[left]
        self.slots.surrender(left)
        self.slots.surrender(right)
        return True

    def mean(self, keys: Sequence[int]) -> Optional[List[float]]:
        acc_slot = self.slots.claim()  # clean: surrendered in finally, None leaves first
        if acc_slot is None:
            return None
        try:
            acc = self.slots.rows[acc_slot]
            acc[:] = [0.0] * self.host.dim
            seen = 0
            for key in keys:
                row = self.get(key)
                if row is None:
                    continue
                seen += 1
                acc[:] = [x + y for x, y in zip(acc, row)]
            if not seen:
                return None
            return [x / seen for x in acc]
        finally:
            self.slots.surrender(acc_slot)

    def start_probe(self, key: int) -> bool:
        """Keep a copy of the row as it is now; compare_probe looks at the drift."""
        row = self.host.fetch(key)
        if row is None:
            return False
        self._probe = self.slots.claim()  # leak: a second start_probe overwrites the held slot
        if self._probe is None:
            return False
        self.slots.rows[self._probe][:] = row
        return True

    def compare_probe(self, key: int) -> float:
        row = self.host.fetch(key)
        if self._probe is None or row is None:
            return 0.0
        return sum(abs(x - y) for x, y in zip(self.slots.rows[self._probe], row))

    def close(self) -> None:
        if self._probe is not None:
            self.slots.surrender(self._probe)
            self._probe = None
        while self._evict_one():
            pass
