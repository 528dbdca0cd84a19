"""Cache of vision/audio encoder outputs. Entries are pinned while a request reads them."""
from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Generator, Iterator, List, Optional, Sequence, Tuple

import numpy as np

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class CacheEntry:
    mm_hash: str
    features: np.ndarray
    pins: int = 0
    tick: int = 0


class EncoderCache:
    """pin() -> entry or None on a miss. An entry with pins is never evicted."""

    def __init__(self, budget_tokens: int) -> None:
        self.budget = budget_tokens
        self._lock = threading.Lock()
        self._entries: Dict[str, CacheEntry] = {}
        self._clock = 0

    def pin(self, mm_hash: str) -> Optional[CacheEntry]:
        with self._lock:
            entry = self._entries.get(mm_hash)
            if entry is None:
                return None
            self._clock += 1
            entry.pins += 1
            entry.tick = self._clock
            return entry

    def unpin(self, entry: CacheEntry) -> None:
        with self._lock:
            assert entry.pins > 0, entry.mm_hash
            entry.pins -= 1

    def insert_pinned(self, mm_hash: str, features: np.ndarray) -> CacheEntry:
        """Insert and leave it pinned for the inserter."""
        with self._lock:
            self._make_room(len(features))
            entry = self._entries.get(mm_hash)
            if entry is None:
                entry = self._entries[mm_hash] = CacheEntry(mm_hash, features)
            entry.pins += 1
            return entry

    def _make_room(self, need: int) -> None:
        used = sum(len(e.features) for e in self._entries.values())
        for e in sorted(self._entries.values(), key=lambda e: e.tick):
            if used + need <= self.budget:
                return
            if e.pins == 0:
                used -= len(e.features)
                del self._entries[e.mm_hash]

    def pinned(self) -> int:
        with self._lock:
            return sum(e.pins for e in self._entries.values())


Encoder = Callable[[bytes], np.ndarray]


@dataclass
class MMRequest:
    rid: str
    hashes: List[str]
    entries: List[CacheEntry] = field(default_factory=list)
    finished: bool = False


class EncoderRunner:
    def __init__(self, cache: EncoderCache, encode: Encoder) -> None:
        self.cache = cache
        self.encode = encode
        self.hits = 0
        self.misses = 0

    def lookup_or_encode(self, mm_hash: str, blob: bytes) -> CacheEntry:
        entry = self.cache.pin(mm_hash)  # clean: returned to the caller, pinned
        if entry is not None:
            self.hits += 1
            return entry
        self.misses += 1
        return self.cache.insert_pinned(mm_hash, self.encode(blob))  # clean: returned to the caller, pinned

    def features(self, mm_hash: str, blob: bytes) -> np.ndarray:
        return self.lookup_or_encode(mm_hash, blob).features.copy()  # leak: the pin is lost once the features are copied

    def is_cached(self, mm_hash: str) -> bool:
        return self.cache.pin(mm_hash) is not None  # leak: a hit is pinned only to be compared

    def is_cached_quiet(self, mm_hash: str) -> bool:
        entry = self.cache.pin(mm_hash)  # clean: near miss, unpinned on the hit
        if entry is None:
            return False
        self.cache.unpin(entry)
        return True

    def attach(self, req: MMRequest, blobs: Dict[str, bytes]) -> bool:
        """Pin everything the request needs; it is unpinned by finish()."""
        for h in req.hashes:
            entry = self.cache.pin(h)  # clean: near miss, kept in req.entries, detached on the failing way
            if entry is None:
                blob = blobs.get(h)
                if blob is None:
                    self.detach(req)
                    return False
                entry = self.cache.insert_pinned(h, self.encode(blob))  # clean: kept in req.entries
            req.entries.append(entry)
        return True

    def attach_cached_only(self, req: MMRequest) -> bool:
        got: List[CacheEntry] = []
        for h in req.hashes:
            entry = self.cache.pin(h)  # leak: a miss after some hits returns without unpinning those
            if entry is None:
                return False
            got.append(entry)
        req.entries = got
        return True

    def detach(self, req: MMRequest) -> None:
        while req.entries:
            self.cache.unpin(req.entries.pop())

    def finish(self, req: MMRequest) -> None:
        if req.finished:
            return
        req.finished = True
        self.detach(req)

    def replace_image(self, req: MMRequest, idx: int, mm_hash: str, blob: bytes) -> None:
        """Edit of an earlier turn: the image at idx becomes another one."""
        fresh = self.lookup_or_encode(mm_hash, blob)  # leak: stays pinned when the index is out of range
        if idx >= len(req.entries):
            logger.warning("%s: no image %d", req.rid, idx)
            return
        self.cache.unpin(req.entries[idx])
        req.entries[idx] = fresh
        req.hashes[idx] = mm_hash

    def swap_first(self, req: MMRequest, mm_hash: str, blob: bytes) -> None:
        fresh = self.lookup_or_encode(mm_hash, blob)  # clean: near miss, takes the place of an entry that is unpinned
        old, req.entries[0] = req.entries[0], fresh
        self.cache.unpin(old)

    def similarity(self, a: str, b: str) -> Optional[float]:
        ea = self.cache.pin(a)  # leak: still pinned when b misses
        if ea is None:
            return None
        eb = self.cache.pin(b)  # clean: unpinned below
        if eb is None:
            logger.debug("no features for %s", b)
            return None
        try:
            return float((ea.features * eb.features).sum())
        finally:
            self.cache.unpin(eb)
            self.cache.unpin(ea)

    def similarity_or_zero(self, a: str, b: str) -> float:
        ea = self.cache.pin(a)  # clean: near miss, the finally looks at each
        eb = self.cache.pin(b)  # clean: near miss, the finally looks at each
        try:
            if ea is None or eb is None:
                return 0.0
            return float((ea.features * eb.features).sum())
        finally:
            for e in (ea, eb):
                if e is not None:
                    self.cache.unpin(e)

    def chunks(self, mm_hash: str, size: int) -> Iterator[np.ndarray]:
        """Slices for chunked prefill."""
        entry = self.cache.pin(mm_hash)  # clean: finally of the generator
        if entry is None:
            return
        try:
            for i in range(0, len(entry.features), size):
                yield entry.features[i : i + size]
        finally:
            self.cache.unpin(entry)

    def chunks_until(self, mm_hash: str, size: int, stop: int) -> Iterator[np.ndarray]:
        entry = self.cache.pin(mm_hash)  # leak: reaching stop returns from the generator before unpin
        if entry is None:
            return
        for i in range(0, len(entry.features), size):
            if i >= stop:
                return
            yield entry.features[i : i + size]
        self.cache.unpin(entry)


class DeepstackReader:
    """Pins lazily; `owned` tells whether the reader or the request holds the pin."""

    def __init__(self, cache: EncoderCache, mm_hash: str, entry: Optional[CacheEntry] = None) -> None:
        self.cache = cache
        self.owned = entry is None
        self.entry = cache.pin(mm_hash) if entry is None else entry  # clean: near miss, close() unpins exactly when owned

    def layer(self, i: int) -> Optional[np.ndarray]:
        return None if self.entry is None else self.entry.features * (i + 1)

    def close(self) -> None:
        if self.owned and self.entry is not None:
            self.cache.unpin(self.entry)
        self.entry = None


def read_layers(cache: EncoderCache, mm_hash: str, n: int) -> List[np.ndarray]:
    reader = DeepstackReader(cache, mm_hash)  # leak: the returns for no entry and for one layer skip close, the latter with the pin held
    first = reader.layer(0)
    if first is None:
        return []
    if n <= 1:
        return [first]
    rest = [reader.layer(i) for i in range(1, n)]
    reader.close()
    return [first, *rest]


def read_one(cache: EncoderCache, mm_hash: str) -> Optional[np.ndarray]:
    reader = DeepstackReader(cache, mm_hash)  # clean: closed
    try:
        return reader.layer(0)
    finally:
        reader.close()
