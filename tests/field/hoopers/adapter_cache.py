"""LoRA adapters in one preallocated device region: uploaded on demand, pinned
while a batch uses them and evicted in LRU order when nobody does."""
from __future__ import annotations

import bisect
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Optional, Tuple

import torch

logger = logging.getLogger(__name__)

ALIGN = 256
MIN_SPLIT = 4096

class OutOfRegion(MemoryError):
    pass

class UnknownAdapter(KeyError):
    pass

class RegionAllocator:
    """First fit over a sorted list of (offset, length) holes."""

    def __init__(self, total: int) -> None:
        self._holes: List[Tuple[int, int]] = [(0, total)]
        self._live: Dict[int, int] = {}
        self.total = total

    def malloc(self, size: int) -> int:
        size = (size + ALIGN - 1) // ALIGN * ALIGN
        for i, (off, length) in enumerate(self._holes):
            if length < size:
                continue
            self._holes.pop(i)  # leak: a tail below MIN_SPLIT is neither put back as a hole nor counted in _live
            if length - size >= MIN_SPLIT:
                self._holes.insert(i, (off + size, length - size))
            self._live[off] = size
            return off
        raise OutOfRegion(f"{size} bytes wanted, {len(self._holes)} holes")

    def free(self, off: int) -> None:
        length = self._live.pop(off)
        i = bisect.bisect(self._holes, (off, length))
        if i < len(self._holes) and off + length == self._holes[i][0]:
            length += self._holes.pop(i)[1]  # clean: merged into the hole that is stored below
        if i > 0 and sum(self._holes[i - 1]) == off:
            prev_off, prev_len = self._holes[i - 1]
            self._holes[i - 1] = (prev_off, prev_len + length)
        else:
            self._holes.insert(i, (off, length))

@dataclass
class AdapterMeta:
    name: str
    rank: int
    a_bytes: int
    b_bytes: int
    path: str

@dataclass
class Adapter:
    meta: AdapterMeta
    a_off: int
    b_off: int
    pins: int = 0

class AdapterCache:
    def __init__(self, alloc: RegionAllocator, index: Dict[str, AdapterMeta], arena: torch.Tensor) -> None:
        self._alloc = alloc
        self._index = index
        self._arena = arena
        self._table: "OrderedDict[str, Adapter]" = OrderedDict()
        self._zombies: List[Adapter] = []
        self._lock = threading.RLock()

    def _upload(self, path: str, off: int, key: str) -> None:
        host = torch.load(path, map_location="cpu")[key].contiguous().view(torch.uint8).flatten()
        self._arena[off:off + host.numel()].copy_(host)

    def _load(self, name: str) -> Adapter:
        meta = self._index.get(name)
        if meta is None:
            raise UnknownAdapter(name)
        a_off = self._alloc.malloc(meta.a_bytes)  # leak: the malloc for B may raise OutOfRegion, which the caller answers with an eviction and a new _load
        b_off = self._alloc.malloc(meta.b_bytes)  # clean: both offsets go into the Adapter
        self._upload(meta.path, a_off, "lora_A")
        self._upload(meta.path, b_off, "lora_B")
        return Adapter(meta, a_off, b_off)

    def _load_with_eviction(self, name: str) -> Adapter:
        while True:
            try:
                return self._load(name)  # clean: returned
            except OutOfRegion:
                if not self._evict_one():
                    raise

    def _drop(self, ad: Adapter) -> None:
        self._alloc.free(ad.a_off)
        self._alloc.free(ad.b_off)

    def _evict_one(self) -> bool:
        for name, ad in self._table.items():
            if ad.pins == 0:
                del self._table[name]
                self._drop(ad)
                logger.info("evicted adapter %s", name)
                return True
        return False

    def pin(self, name: str) -> Adapter:
        with self._lock:
            ad = self._table.get(name)
            if ad is None:
                ad = self._load_with_eviction(name)  # clean: the table keeps it until eviction or refresh frees it
                self._table[name] = ad
            self._table.move_to_end(name)
            ad.pins += 1
            return ad

    def unpin(self, ad: Adapter) -> None:
        with self._lock:
            ad.pins -= 1
            if ad.pins == 0 and ad in self._zombies:
                self._zombies.remove(ad)
                self._drop(ad)

    def refresh(self, name: str) -> None:
        """Take a new version from disk; running batches go on with the old one."""
        with self._lock:
            old = self._table.get(name)
            fresh = self._load_with_eviction(name)  # clean: near miss, stored in the table while the old one is freed now or as a zombie later
            still_cached = self._table.get(name) is old
            self._table[name] = fresh
            if old is None or not still_cached:
                return
            if old.pins:
                self._zombies.append(old)
            else:
                self._drop(old)

class Pinned:
    def __init__(self, cache: AdapterCache, name: Optional[str]) -> None:
        self._cache, self._name, self._ad = cache, name, None

    def __enter__(self) -> Optional[Adapter]:
        if self._name is not None:
            self._ad = self._cache.pin(self._name)  # clean: __exit__ unpins it
        return self._ad

    def __exit__(self, *exc) -> None:
        if self._ad is not None:
            self._cache.unpin(self._ad)
            self._ad = None

@dataclass
class Batch:
    rows: List[Tuple[object, Optional[Adapter]]] = field(default_factory=list)

    def add(self, req, ad: Optional[Adapter]) -> None:
        self.rows.append((req, ad))

    def release(self, cache: AdapterCache) -> None:
        for _, ad in self.rows:
            if ad is not None:
                cache.unpin(ad)
        self.rows.clear()

class BatchBuilder:
    def __init__(self, cache: AdapterCache, max_rank: int, max_rows: int) -> None:
        self.cache, self.max_rank, self.max_rows = cache, max_rank, max_rows

    def build(self, requests: Iterable) -> Batch:
        batch = Batch()
        for req in requests:
            if len(batch.rows) >= self.max_rows:
                break
            try:
                ad = self.cache.pin(req.adapter) if req.adapter else None  # leak: rejected for its rank, the adapter stays pinned
            except (UnknownAdapter, OutOfRegion) as exc:
                req.reject(repr(exc))
                continue
            if ad is not None and ad.meta.rank > self.max_rank:
                req.reject(f"rank {ad.meta.rank} is over {self.max_rank}")
                continue
            batch.add(req, ad)
        return batch

class LoraEngine:
    def __init__(self, cache: AdapterCache, alloc: RegionAllocator, builder: BatchBuilder, runner) -> None:
        self.cache, self.alloc, self.builder, self.runner = cache, alloc, builder, runner
        self._merged: Dict[str, Tuple[int, int]] = {}
        self._hot: Dict[str, Adapter] = {}

    def step(self, requests: List) -> int:
        batch = self.builder.build(requests)  # clean: near miss, the pins of its rows are given back by batch.release
        try:
            if not batch.rows:
                return 0
            self.runner.forward([(r, ad.a_off, ad.b_off) if ad else (r, -1, -1) for r, ad in batch.rows])
            return len(batch.rows)
        finally:
            batch.release(self.cache)

    def keep_hot(self, names: Iterable[str]) -> None:
        """Called by the statistics thread once a minute with the popular names."""
        for name in names:
            try:
                self._hot[name] = self.cache.pin(name)  # leak: a name that is hot already is pinned again, cooldown unpins it once
            except (UnknownAdapter, OutOfRegion):
                logger.debug("cannot keep %s hot", name)

    def cooldown(self) -> None:
        while self._hot:
            _, ad = self._hot.popitem()
            self.cache.unpin(ad)

    def merge(self, key: str, weights: Dict[str, float], nbytes: int) -> bool:
        if key in self._merged:
            return True
        scratch = self.alloc.malloc(nbytes)  # clean: near miss, freed unless it moved into _merged
        owned = True
        try:
            for name, weight in weights.items():
                with Pinned(self.cache, name) as ad:  # clean: with statement
                    if not self.runner.accumulate(scratch, ad.a_off, ad.b_off, weight):
                        return False
            self._merged[key] = (scratch, nbytes)
            owned = False
            return True
        finally:
            if owned:
                self.alloc.free(scratch)

    def drop_merged(self, key: str) -> None:
        entry = self._merged.pop(key, None)
        if entry is not None:
            self.alloc.free(entry[0])

class StickySession:
    """A chat that stays with one adapter until the user picks another."""

    def __init__(self, cache: AdapterCache) -> None:
        self._cache = cache
        self._current: Optional[Adapter] = None

    def switch(self, name: str) -> int:
        self._current = self._cache.pin(name)  # leak: the pin of the adapter in use before is overwritten
        return self._current.meta.rank

    def close(self) -> None:
        if self._current is not None:
            self._cache.unpin(self._current)
            self._current = None
