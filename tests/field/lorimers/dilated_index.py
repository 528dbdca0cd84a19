"""Gather-index tables for dilated attention segments, cached per (segment, rate) and pinned while in use."""
from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

Key = Tuple[int, int]


@dataclass
class IndexEntry:
    key: Key
    rows: np.ndarray
    pins: int = 0


class IndexCache:
    """LRU of index tables. A pinned entry is never evicted."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lru: "OrderedDict[Key, IndexEntry]" = OrderedDict()
        self._mu = threading.RLock()

    def pin(self, segment: int, rate: int) -> IndexEntry:
        key = (segment, rate)
        with self._mu:
            entry = self._lru.get(key)
            if entry is None:
                entry = IndexEntry(key, np.arange(0, segment, rate))
                self._lru[key] = entry
            entry.pins += 1
            self._lru.move_to_end(key)
            self._evict()
            return entry

    def pin_if_cached(self, segment: int, rate: int) -> Optional[IndexEntry]:
        with self._mu:
            if (segment, rate) not in self._lru:
                return None
            return self.pin(segment, rate)  # clean: returned to the caller

    def unpin(self, entry: IndexEntry) -> None:
        with self._mu:
            if entry.pins <= 0:
                raise ValueError(f"unbalanced unpin of {entry.key}")
            entry.pins -= 1
            self._evict()

    def _evict(self) -> None:
        for key in [k for k, e in self._lru.items() if e.pins == 0]:
            if len(self._lru) <= self.capacity:
                break
            del self._lru[key]

    def pinned(self) -> int:
        return sum(e.pins for e in self._lru.values())


class PinnedIndex:
    """Owning handle; `close` may be called more than once."""

    def __init__(self, cache: IndexCache, segment: int, rate: int) -> None:
        self._cache = cache
        self._entry: Optional[IndexEntry] = cache.pin(segment, rate)  # clean: unpinned by close

    @property
    def rows(self) -> np.ndarray:
        return self._entry.rows

    def close(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            self._cache.unpin(entry)

    def __enter__(self) -> "PinnedIndex":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def open_index(cache: IndexCache, segment: int, rate: int) -> PinnedIndex:
    if segment % rate:
        segment += rate - segment % rate
    return PinnedIndex(cache, segment, rate)  # clean: the handle is returned


@dataclass
class DilationSchedule:
    segments: Sequence[int]
    rates: Sequence[int]
    offset_heads: bool = False


class DilatedAttention:
    def __init__(self, cache: IndexCache, schedule: DilationSchedule) -> None:
        self.cache = cache
        self.schedule = schedule
        self._by_head: Dict[int, IndexEntry] = {}
        self._resident: List[PinnedIndex] = []

    def forward(self, x: np.ndarray) -> np.ndarray:
        out = np.zeros_like(x)
        for seg, rate in zip(self.schedule.segments, self.schedule.rates):
            with open_index(self.cache, seg, rate) as idx:  # clean: the handle closes at the end of the with
                rows = idx.rows[idx.rows < len(x)]
                out[rows] += x[rows]
        return out

    def forward_sliding(self, x: np.ndarray) -> np.ndarray:
        out = np.zeros_like(x)
        for seg, rate in zip(self.schedule.segments, self.schedule.rates):
            idx = open_index(self.cache, seg, rate)  # leak: break on the over-long segment leaves the handle open
            if seg > len(x):
                out += x
                break
            out[idx.rows[idx.rows < len(x)]] += 1
            idx.close()
        return out

    def coverage(self, n: int) -> float:
        seen: set = set()
        for seg, rate in zip(self.schedule.segments, self.schedule.rates):
            seen.update(r for r in open_index(self.cache, seg, rate).rows.tolist() if r < n)  # leak: the temporary handle is never closed
        return len(seen) / n

    def make_resident(self) -> None:
        for seg, rate in zip(self.schedule.segments, self.schedule.rates):
            self._resident.append(open_index(self.cache, seg, rate))  # clean: drop_resident closes them all

    def drop_resident(self) -> None:
        while self._resident:
            self._resident.pop().close()

    def assign_heads(self, heads: int) -> None:
        for h in range(heads):
            i = h % len(self.schedule.rates)
            entry = self.cache.pin(self.schedule.segments[i], self.schedule.rates[i])  # leak: a second assign_heads overwrites the entry still pinned
            self._by_head[h] = entry

    def reassign_head(self, head: int, segment: int, rate: int) -> None:
        old = self._by_head.get(head)
        self._by_head[head] = self.cache.pin(segment, rate)  # clean: near miss, the old one was saved and is unpinned below
        if old is not None:
            self.cache.unpin(old)

    def clear_heads(self) -> None:
        for entry in self._by_head.values():
            self.cache.unpin(entry)
        self._by_head = {}

    def head_offsets(self, head: int, segment: int, rate: int) -> Optional[np.ndarray]:
        entry = self.cache.pin_if_cached(segment, rate)  # leak: the offset_heads return leaves it pinned
        if entry is None:
            return None
        if self.schedule.offset_heads:
            return entry.rows + head % rate
        rows = entry.rows.copy()
        self.cache.unpin(entry)
        return rows

    def head_count(self, segment: int, rate: int) -> int:
        entry = self.cache.pin_if_cached(segment, rate)  # clean: near miss, the early return is the None case
        if not entry:
            return 0
        n = int(entry.rows.size)
        self.cache.unpin(entry)
        return n


class IndexUploader:
    """Copies tables to the device on a worker thread; the callback unpins."""

    def __init__(self, cache: IndexCache, workers: int = 2) -> None:
        self.cache = cache
        self._exec = ThreadPoolExecutor(workers)
        self.uploaded: Dict[Key, int] = {}

    def _copy(self, entry: IndexEntry) -> Key:
        self.uploaded[entry.key] = int(entry.rows.sum())
        return entry.key

    def upload(self, segment: int, rate: int) -> "Future[Key]":
        entry = self.cache.pin(segment, rate)  # clean: near miss, the done-callback unpins
        fut = self._exec.submit(self._copy, entry)
        fut.add_done_callback(lambda _f, e=entry: self.cache.unpin(e))
        return fut

    def upload_all(self, keys: Sequence[Key], on_done: Optional[Callable[[Key], None]] = None) -> None:
        futs = []
        for seg, rate in keys:
            entry = self.cache.pin(seg, rate)  # leak: with no on_done nothing is attached that unpins
            fut = self._exec.submit(self._copy, entry)
            if on_done is not None:
                def _finish(f: "Future[Key]", e: IndexEntry = entry) -> None:
                    self.cache.unpin(e)
                    on_done(f.result())
                fut.add_done_callback(_finish)
            futs.append(fut)
        for f in futs:
            f.result()

    def prefetch(self, keys: Sequence[Key]) -> int:
        entries = {k: self.cache.pin(*k) for k in keys}  # clean: each value unpinned in the finally
        try:
            return sum(len(self._copy(e)) for e in entries.values())
        finally:
            for e in entries.values():
                self.cache.unpin(e)

    def shutdown(self) -> None:
        self._exec.shutdown(wait=True)


def main() -> None:
    cache = IndexCache(4)
    att = DilatedAttention(cache, DilationSchedule([8, 16, 32], [1, 2, 4]))
    att.forward(np.ones(16))
    att.make_resident()
    att.drop_resident()
    att.assign_heads(3)
    att.reassign_head(0, 64, 8)
    att.clear_heads()
    up = IndexUploader(cache)
    up.upload(8, 1).result()
    up.upload_all([(8, 1)], print)
    up.prefetch([(8, 1), (16, 2)])
    att.head_count(8, 1), att.head_offsets(0, 8, 1)
    up.shutdown()
    print("pins", cache.pinned())
    att.forward_sliding(np.ones(16))
    att.coverage(16)
    att.assign_heads(2)
    att.assign_heads(2)
    print("pins", cache.pinned())


if __name__ == "__main__":
    main()
