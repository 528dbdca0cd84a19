"""Vector search over immutable segments; readers hold references while they look."""
from __future__ import annotations

import heapq
import logging
import threading
from contextlib import contextmanager
from typing import Callable, Iterator, Optional

log = logging.getLogger("segment_search")
Hit = tuple[float, int]


class Segment:
    """Reference counted: the creator holds the first reference."""

    def __init__(self, name: str, vectors: list[list[float]]) -> None:
        self.name = name
        self.vectors = vectors
        self._refs = 1
        self._lock = threading.Lock()
        self.deleted: set[int] = set()

    def incref(self) -> "Segment":
        with self._lock:
            self._refs += 1
        return self

    def try_incref(self) -> bool:
        with self._lock:
            if self._refs == 0:
                return False
            self._refs += 1
            return True

    def decref(self) -> None:
        with self._lock:
            self._refs -= 1
            if self._refs == 0:
                self.vectors = []

    def knn(self, query: list[float], k: int) -> list[Hit]:
        scored = ((sum(a * b for a, b in zip(query, v)), i) for i, v in enumerate(self.vectors))
        return heapq.nlargest(k, (hit for hit in scored if hit[1] not in self.deleted))


class Catalog:
    """The current segments. get() gives a reference that the caller drops with decref()."""

    def __init__(self) -> None:
        self._segments: dict[str, Segment] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> Optional[Segment]:
        with self._lock:
            segment = self._segments.get(name)
            if segment is None:
                return None
            return segment.incref()  # clean: handed to the caller

    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._segments)

    def publish(self, segment: Segment) -> None:
        """Takes over the reference of the caller."""
        with self._lock:
            old = self._segments.get(segment.name)
            self._segments[segment.name] = segment
        if old is not None:
            old.decref()

    def remove(self, name: str) -> bool:
        with self._lock:
            segment = self._segments.pop(name, None)
        if segment is None:
            return False
        segment.decref()
        return True

    def snapshot(self) -> list[Segment]:
        """References to all segments; drop_all() gives them back."""
        with self._lock:
            return [s.incref() for s in self._segments.values()]  # clean: handed to the caller in a list

    @contextmanager
    def reading(self, name: str) -> Iterator[Optional[Segment]]:
        segment = self.get(name)  # clean: dropped when the block ends
        try:
            yield segment
        finally:
            if segment is not None:
                segment.decref()


def drop_all(segments: list[Segment]) -> None:
    while segments:
        segments.pop().decref()


class Searcher:
    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.hot: Optional[Segment] = None
        self.cold: Optional[Segment] = None
        self.served = 0

    def search(self, query: list[float], k: int) -> list[Hit]:
        view = self.catalog.snapshot()  # clean: the finally drops all of them
        try:
            hits: list[Hit] = []
            for segment in view:
                hits.extend(segment.knn(query, k))
            self.served += 1
            return heapq.nlargest(k, hits)
        finally:
            drop_all(view)

    def search_first(self, query: list[float], floor: float) -> Optional[Hit]:
        """Stops at the first segment with a hit that is good enough."""
        for name in self.catalog.names():
            segment = self.catalog.get(name)  # leak: the return from the loop keeps the reference
            if segment is None:
                continue
            best = segment.knn(query, 1)
            if best and best[0][0] >= floor:
                return best[0]
            segment.decref()
        return None

    def search_named(self, name: str, query: list[float], k: int) -> list[Hit]:
        with self.catalog.reading(name) as segment:  # clean: near miss, return leaves the block
            if segment is None:
                return []
            return segment.knn(query, k)

    def size(self) -> int:
        return sum(len(s.vectors) for s in self.catalog.snapshot())  # leak: the references of the list are dropped

    def live_rows(self) -> int:
        total = 0
        for segment in self.catalog.snapshot():  # clean: near miss, each one is dropped in the loop
            total += len(segment.vectors) - len(segment.deleted)
            segment.decref()
        return total

    def set_hot(self, name: str) -> bool:
        fresh = self.catalog.get(name)  # clean: kept in hot, the old one is dropped, close() drops the last
        if fresh is None:
            return False
        old, self.hot = self.hot, fresh
        if old is not None:
            old.decref()
        return True

    def set_cold(self, name: str) -> bool:
        fresh = self.catalog.get(name)  # leak: a second call overwrites cold without decref
        if fresh is None:
            return False
        self.cold = fresh
        return True

    def close(self) -> None:
        for segment in (self.hot, self.cold):
            if segment is not None:
                segment.decref()
        self.hot = self.cold = None

    def vacuum(self, segment: Segment, threshold: float) -> bool:
        if not segment.try_incref():  # leak: not dropped when there is little to do
            return False
        ratio = len(segment.deleted) / max(1, len(segment.vectors))
        if ratio < threshold:
            log.debug("segment %s has few tombstones", segment.name)
            return False
        segment.vectors = [v for i, v in enumerate(segment.vectors) if i not in segment.deleted]
        segment.deleted.clear()
        segment.decref()
        return True

    def visit(self, name: str, fn: Callable[[Segment, Callable[[], None]], None]) -> bool:
        segment = self.catalog.get(name)  # clean: near miss, decref goes to the visitor as its done callback
        if segment is None:
            return False
        fn(segment, segment.decref)
        return True
