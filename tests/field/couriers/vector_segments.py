"""Segmented vector index. Searches pin the segments they read, merges retire them."""
from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np


@dataclass
class Segment:
    seg_id: int
    vectors: np.ndarray
    ids: np.ndarray
    readers: int = 0
    retired: bool = False


class SegmentRegistry:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        self._next_id = 0

    def add(self, vectors: np.ndarray, ids: np.ndarray) -> int:
        with self._lock:  # clean: with block
            seg_id = self._next_id
            self._next_id += 1
            self._segments[seg_id] = Segment(seg_id, vectors, ids)
            return seg_id

    def open_reader(self, seg_id: int) -> Segment | None:
        self._lock.acquire()  # clean: near miss, finally also covers the early return
        try:
            seg = self._segments.get(seg_id)
            if seg is None or seg.retired:
                return None
            seg.readers += 1  # clean: the reader count belongs to the caller
            return seg
        finally:
            self._lock.release()

    def close_reader(self, seg: Segment) -> None:
        with self._lock:  # clean: with block
            seg.readers -= 1
            if seg.retired and seg.readers == 0:
                self._segments.pop(seg.seg_id, None)

    def retire(self, seg_id: int) -> None:
        self._lock.acquire()  # leak: an unknown id returns with the lock taken
        seg = self._segments.get(seg_id)
        if seg is None:
            return
        seg.retired = True
        if seg.readers == 0:
            del self._segments[seg_id]
        self._lock.release()

    def live_ids(self) -> list[int]:
        return [i for i, s in list(self._segments.items()) if not s.retired]


class Snapshot:
    """A consistent set of segments for one query session."""

    def __init__(self, registry: SegmentRegistry) -> None:
        self.registry = registry
        self.segments: list[Segment] = []
        self.closed = False
        self.matched = 0

    def __enter__(self) -> "Snapshot":
        for seg_id in self.registry.live_ids():
            seg = self.registry.open_reader(seg_id)  # leak: __exit__ returns early when nothing matched, before the readers are closed
            if seg is not None:
                self.segments.append(seg)
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.closed or not self.matched:
            return False
        self.closed = True
        while self.segments:
            self.registry.close_reader(self.segments.pop())
        return False


class Searcher:
    def __init__(self, registry: SegmentRegistry, dim: int) -> None:
        self.registry = registry
        self.dim = dim
        self.pinned: dict[int, Segment] = {}

    def search_segment(self, seg_id: int, query: np.ndarray, k: int) -> list[tuple[float, int]]:
        seg = self.registry.open_reader(seg_id)  # clean: closed after scoring
        if seg is None:
            return []
        scores = seg.vectors @ query
        top = np.argsort(-scores)[:k]
        hits = [(float(scores[i]), int(seg.ids[i])) for i in top]
        self.registry.close_reader(seg)
        return hits

    def lookup(self, doc_id: int) -> np.ndarray | None:
        for seg_id in self.registry.live_ids():
            seg = self.registry.open_reader(seg_id)  # leak: the found vector is copied and returned, the reader stays open
            if seg is None:
                continue
            pos = np.flatnonzero(seg.ids == doc_id)
            if pos.size:
                return seg.vectors[pos[0]].copy()
            self.registry.close_reader(seg)
        return None

    def pin(self, seg_id: int) -> bool:
        if seg_id in self.pinned:
            return True
        seg = self.registry.open_reader(seg_id)  # clean: near miss, stored in pinned, closed by unpin_all
        if seg is None:
            return False
        self.pinned[seg_id] = seg
        return True

    def search(self, query: np.ndarray, k: int, floor: float = 0.0) -> list[tuple[float, int]]:
        hits: list[tuple[float, int]] = []
        with Snapshot(self.registry) as snap:  # leak: without a match the exit leaves the readers open
            for seg in snap.segments:
                scores = seg.vectors @ query
                for i in np.flatnonzero(scores > floor):
                    hits.append((float(scores[i]), int(seg.ids[i])))
            snap.matched = len(hits)
        return sorted(hits, reverse=True)[:k]

    def unpin_all(self) -> None:
        for seg in self.pinned.values():
            self.registry.close_reader(seg)
        self.pinned.clear()

    def merge(self, left_id: int, right_id: int) -> int | None:
        left = self.registry.open_reader(left_id)  # leak: lost when the right segment is gone
        if left is None:
            return None
        right = self.registry.open_reader(right_id)  # clean: closed in finally
        if right is None:
            return None
        try:
            merged = self.registry.add(
                np.concatenate([left.vectors, right.vectors]),
                np.concatenate([left.ids, right.ids]),
            )
        finally:
            self.registry.close_reader(right)
            self.registry.close_reader(left)
        self.registry.retire(left_id)
        self.registry.retire(right_id)
        return merged
