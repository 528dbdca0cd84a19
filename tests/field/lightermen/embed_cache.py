"""Image embedding cache whose entries are pinned while a forward pass reads them."""
from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence


@dataclass
class Entry:
    key: str
    value: Any
    nbytes: int
    pins: int = 0
    born: float = field(default_factory=time.monotonic)


class PinnedLRU:
    """lookup() and store() answer an entry with a pin for the caller; unpin() ends it.

    Entries with pins are not evicted.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._map: "OrderedDict[str, Entry]" = OrderedDict()
        self._lock = threading.RLock()

    def lookup(self, key: str) -> Optional[Entry]:
        with self._lock:
            entry = self._map.get(key)
            if entry is None:
                return None
            entry.pins += 1
            self._map.move_to_end(key)
            return entry

    def store(self, key: str, value: Any, nbytes: int) -> Entry:
        with self._lock:
            entry = Entry(key, value, nbytes, pins=1)
            old = self._map.pop(key, None)
            if old is not None:
                self.bytes -= old.nbytes
            self._map[key] = entry
            self.bytes += nbytes
            self._evict()
            return entry

    def unpin(self, entry: Entry) -> None:
        with self._lock:
            entry.pins -= 1

    def contains(self, key: str) -> bool:
        entry = self.lookup(key)  # leak: the pin that lookup takes stays on the entry
        return entry is not None

    def _evict(self) -> None:
        for key in list(self._map):
            if self.bytes <= self.max_bytes:
                return
            entry = self._map[key]
            if entry.pins == 0:
                del self._map[key]
                self.bytes -= entry.nbytes

    @contextmanager
    def reading_many(self, keys: Sequence[str]) -> Iterator[List[Entry]]:
        held: List[Entry] = []
        try:
            for key in keys:
                entry = self.lookup(key)  # clean: in `held`, unpinned by the finally
                if entry is not None:
                    held.append(entry)
            yield held
        finally:
            for entry in held:
                self.unpin(entry)


def image_key(image: bytes, model_id: str) -> str:
    h = hashlib.sha256(model_id.encode())
    h.update(image)
    return h.hexdigest()


class CachedEncoder:
    def __init__(self, cache: PinnedLRU, encode: Callable[[bytes], Any], model_id: str) -> None:
        self.cache = cache
        self.encode = encode
        self.model_id = model_id
        self.hits = 0
        self.misses = 0

    def get(self, image: bytes) -> Entry:
        """A pinned entry, which the caller unpins."""
        key = image_key(image, self.model_id)
        entry = self.cache.lookup(key)  # clean: handed to the caller
        if entry is not None:
            self.hits += 1
            return entry
        self.misses += 1
        value = self.encode(image)
        return self.cache.store(key, value, len(value) * 2)  # clean: handed to the caller

    def refresh(self, image: bytes, max_age: float) -> Entry:
        """Like get, but an old value is encoded again."""
        key = image_key(image, self.model_id)
        entry = self.cache.lookup(key)  # leak: an entry that is too old is left with its pin
        if entry is not None and time.monotonic() - entry.born <= max_age:
            self.hits += 1
            return entry
        value = self.encode(image)
        return self.cache.store(key, value, len(value) * 2)  # clean: handed to the caller

    def warm_from(self, dump: Mapping[str, bytes]) -> int:
        loaded = 0
        for name in sorted(dump):
            blob = dump[name]
            if not blob:
                continue
            self.cache.store(name, blob, len(blob))  # leak: the pin of the new entry is discarded
            loaded += 1
        return loaded

    def dedup(self, images: Sequence[bytes], limit: float) -> List[int]:
        """Numbers of the images that are not near duplicates of the one before."""
        keep: List[int] = []
        prev: Optional[Entry] = None
        for i, image in enumerate(images):
            cur = self.get(image)  # clean: near miss, unpinned when it was replaced or after the loop
            if prev is not None:
                gap = sum(abs(x - y) for x, y in zip(cur.value, prev.value))
                self.cache.unpin(prev)
                if gap > limit:
                    keep.append(i)
            else:
                keep.append(i)
            prev = cur
        if prev is not None:
            self.cache.unpin(prev)
        return keep


class ForwardBatch:
    """The embeddings that a forward pass reads, by position in the prompt."""

    def __init__(self, encoder: CachedEncoder) -> None:
        self.encoder = encoder
        self.by_position: Dict[int, Entry] = {}
        self.negatives: Dict[int, Entry] = {}

    def attach(self, position: int, image: bytes) -> None:
        if position in self.by_position:
            self.encoder.cache.unpin(self.by_position.pop(position))
        self.by_position[position] = self.encoder.get(image)  # clean: near miss, done() unpins it

    def attach_negative(self, position: int, image: bytes) -> None:
        if position in self.negatives:
            return
        self.negatives[position] = self.encoder.get(image)  # leak: done() clears these without unpin

    def values(self) -> List[Any]:
        return [self.by_position[p].value for p in sorted(self.by_position)]

    def done(self) -> None:
        for entry in self.by_position.values():
            self.encoder.cache.unpin(entry)
        self.by_position.clear()
        self.negatives.clear()


def pooled_vector(cache: PinnedLRU, keys: Sequence[str]) -> List[float]:
    with cache.reading_many(keys) as entries:  # clean: the manager unpins
        if not entries:
            return []
        width = len(entries[0].value)
        return [sum(e.value[i] for e in entries) / len(entries) for i in range(width)]


def copy_between(src: PinnedLRU, dst: PinnedLRU, keys: Sequence[str]) -> int:
    moved = 0
    for key in keys:
        entry = src.lookup(key)  # leak: `continue` for a value that is too large skips unpin
        if entry is None:
            continue
        if entry.nbytes > dst.max_bytes // 8:
            continue
        placed = dst.store(key, entry.value, entry.nbytes)  # clean: unpinned at once
        dst.unpin(placed)
        src.unpin(entry)
        moved += 1
    return moved
