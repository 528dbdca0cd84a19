"""Cache of text embeddings; entries are pinned while somebody reads them."""
from __future__ import annotations

import logging
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Callable, Iterator, Optional

log = logging.getLogger("embedding_cache")
Vector = list[float]


@dataclass(eq=False)
class Entry:
    key: str
    vector: Vector
    pins: int = 0
    stale: bool = False


class EmbeddingCache:
    """lookup() and insert() give a pinned entry, unpin() ends the use of it."""

    def __init__(self, capacity: int) -> None:
        self._entries: dict[str, Entry] = {}
        self._capacity = capacity
        self._lock = threading.RLock()
        self.hits = 0

    def lookup(self, key: str) -> Optional[Entry]:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self.hits += 1
            entry.pins += 1
            return entry

    def insert(self, key: str, vector: Vector) -> Entry:
        with self._lock:
            self._evict()
            entry = Entry(key, vector, pins=1)
            self._entries[key] = entry
            return entry

    def unpin(self, entry: Entry) -> None:
        with self._lock:
            entry.pins -= 1

    def _evict(self) -> None:
        if len(self._entries) < self._capacity:
            return
        for key, entry in list(self._entries.items()):
            if entry.pins == 0:
                del self._entries[key]
                return

    def lookup_fresh(self, key: str) -> Optional[Entry]:
        entry = self.lookup(key)  # clean: unpinned when it is stale, else returned
        if entry is not None and entry.stale:
            self.unpin(entry)
            return None
        return entry

    def lookup_sized(self, key: str, width: int) -> Optional[Entry]:
        entry = self.lookup(key)  # leak: an entry of another width stays pinned, the caller gets None
        if entry is None or len(entry.vector) != width:
            return None
        return entry

    @contextmanager
    def pinned(self, key: str) -> Iterator[Optional[Entry]]:
        entry = self.lookup(key)  # clean: unpinned when the block ends
        try:
            yield entry
        finally:
            if entry is not None:
                self.unpin(entry)


class Handle:
    """A pinned entry that is closed once; also usable with the with statement."""

    def __init__(self, cache: EmbeddingCache, entry: Entry) -> None:
        self._cache = cache
        self._entry: Optional[Entry] = entry

    @property
    def vector(self) -> Vector:
        assert self._entry is not None
        return self._entry.vector

    def close(self) -> None:
        if self._entry is not None:
            self._cache.unpin(self._entry)
            self._entry = None

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class Embedder:
    def __init__(self, cache: EmbeddingCache, encode: Callable[[list[str]], list[Vector]]) -> None:
        self.cache = cache
        self.encode = encode
        self.anchors: dict[str, Handle] = {}
        self.calls = 0

    def obtain(self, text: str) -> Entry:
        """A pinned entry in any case; the caller unpins it."""
        entry = self.cache.lookup_fresh(text)  # clean: near miss, returned when it is there
        if entry is None:
            self.calls += 1
            entry = self.cache.insert(text, self.encode([text])[0])  # clean: returned
        return entry

    def handle(self, text: str) -> Handle:
        return Handle(self.cache, self.obtain(text))  # clean: the handle of the caller owns the entry

    def embed_many(self, texts: list[str]) -> list[Vector]:
        out: list[Optional[Vector]] = [None] * len(texts)
        missing: list[int] = []
        for i, text in enumerate(texts):
            entry = self.cache.lookup(text)  # clean: unpinned in each round where it exists
            if entry is None:
                missing.append(i)
                continue
            out[i] = list(entry.vector)
            self.cache.unpin(entry)
        for i, vector in zip(missing, self.encode([texts[i] for i in missing])):
            out[i] = vector
            self.cache.insert(texts[i], vector)  # leak: new entries are pinned and nobody unpins them
        return [vector for vector in out if vector is not None]

    def distance(self, left: str, right: str) -> float:
        with ExitStack() as stack:
            a = stack.enter_context(self.handle(left))  # clean: near miss, the stack closes the handle
            b = stack.enter_context(self.handle(right))  # clean: near miss, the stack closes the handle
            return sum((x - y) ** 2 for x, y in zip(a.vector, b.vector)) ** 0.5

    def norm(self, text: str) -> float:
        return sum(x * x for x in self.handle(text).vector) ** 0.5  # leak: the handle is not closed

    def set_anchor(self, name: str, text: str) -> None:
        old = self.anchors.pop(name, None)
        if old is not None:
            old.close()
        self.anchors[name] = self.handle(text)  # clean: near miss, the old handle was closed

    def invalidate(self, text: str) -> bool:
        entry = self.cache.lookup(text)  # leak: marked as stale and left pinned
        if entry is None:
            return False
        entry.stale = True
        return True

    def centroid(self, texts: list[str]) -> Optional[Vector]:
        handles = [self.handle(text) for text in texts]  # leak: an empty first vector returns before the loop
        if handles and not handles[0].vector:
            return None
        columns = list(zip(*(h.vector for h in handles)))
        for handle in handles:
            handle.close()
        return [sum(c) / len(c) for c in columns]

    def close(self) -> None:
        for handle in self.anchors.values():
            handle.close()
        self.anchors.clear()
