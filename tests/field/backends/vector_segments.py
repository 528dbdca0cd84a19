"""Vector store whose searches pin immutable segments while they read them."""
from __future__ import annotations

import heapq
import threading
from dataclasses import dataclass, field


@dataclass(eq=False)
class Segment:
    seg_id: int
    vectors: dict[str, list[float]] = field(default_factory=dict)
    pins: int = 0
    retired: bool = False

    def score(self, query: list[float]) -> list[tuple[float, str]]:
        return [(sum(a * b for a, b in zip(query, v)), k) for k, v in self.vectors.items()]


class SegmentRegistry:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: dict[int, Segment] = {}

    def add(self, segment: Segment) -> None:
        self._segments[segment.seg_id] = segment

    def pin(self, seg_id: int) -> Segment | None:
        with self._lock:
            segment = self._segments.get(seg_id)
            if segment is None or segment.retired:
                return None
            segment.pins += 1  # clean: the pin belongs to the caller
            return segment

    def pin_all(self) -> list[Segment]:
        pinned = []
        with self._lock:
            for segment in self._segments.values():
                segment.pins += 1  # leak: a retired segment is pinned and then left out of the list
                if segment.retired:
                    continue
                pinned.append(segment)
        return pinned

    def unpin(self, segment: Segment) -> None:
        with self._lock:
            segment.pins -= 1
            if segment.retired and segment.pins == 0:
                self._segments.pop(segment.seg_id, None)

    def retire(self, seg_id: int) -> None:
        with self._lock:
            segment = self._segments.get(seg_id)
            if segment is not None:
                segment.retired = True
                if segment.pins == 0:
                    del self._segments[seg_id]


class Snapshot:
    def __init__(self, registry: SegmentRegistry) -> None:
        self._registry = registry
        self.segments: list[Segment] = []

    def __enter__(self) -> "Snapshot":
        self.segments = self._registry.pin_all()  # clean: near miss, __exit__ unpins the whole list
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        for segment in self.segments:
            self._registry.unpin(segment)
        self.segments = []
        return False


class LazyView:
    def __init__(self, registry: SegmentRegistry, ids: list[int]) -> None:
        self._registry = registry
        self._ids = ids
        self._held: list[Segment] = []
        self.reads = 0

    def __enter__(self) -> "LazyView":
        for seg_id in self._ids:
            segment = self._registry.pin(seg_id)  # leak: __exit__ returns early when nothing was read, with the pins held
            if segment is not None:
                self._held.append(segment)
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        if not self.reads:
            return False
        while self._held:
            self._registry.unpin(self._held.pop())
        return False

    def get(self, key: str) -> list[float] | None:
        self.reads += 1
        return next((s.vectors[key] for s in self._held if key in s.vectors), None)


class Searcher:
    def __init__(self, registry: SegmentRegistry) -> None:
        self._registry = registry
        self._cursors: dict[str, tuple[Segment, int]] = {}

    def top(self, query: list[float], k: int) -> list[tuple[float, str]]:
        found: list[tuple[float, str]] = []
        with Snapshot(self._registry) as snap:  # clean: with
            for segment in snap.segments:
                found.extend(segment.score(query))
        return heapq.nlargest(k, found)

    def top_in(self, seg_id: int, query: list[float], k: int) -> list[tuple[float, str]]:
        segment = self._registry.pin(seg_id)  # leak: an empty segment returns before unpin
        if segment is None:
            return []
        if not segment.vectors:
            return []
        best = heapq.nlargest(k, segment.score(query))
        self._registry.unpin(segment)
        return best

    def first_above(self, ids: list[int], query: list[float], floor: float) -> str | None:
        for seg_id in ids:
            segment = self._registry.pin(seg_id)  # clean: near miss, unpinned before the hit is examined
            if segment is None:
                continue
            scored = segment.score(query)
            self._registry.unpin(segment)
            hit = max(scored, default=None)
            if hit is not None and hit[0] > floor:
                return hit[1]
        return None

    def compare(self, left_id: int, right_id: int, query: list[float]) -> float | None:
        left = self._registry.pin(left_id)  # clean: near miss, unpinned when the right one is refused and at the end
        if left is None:
            return None
        right = self._registry.pin(right_id)  # clean: unpinned at the end
        if right is None:
            self._registry.unpin(left)
            return None
        gap = sum(s for s, _ in left.score(query)) - sum(s for s, _ in right.score(query))
        self._registry.unpin(right)
        self._registry.unpin(left)
        return gap

    def open_cursor(self, name: str, seg_id: int) -> bool:
        if name in self._cursors:
            return False
        segment = self._registry.pin(seg_id)  # leak: close_all clears the cursor table with the pins in it
        if segment is None:
            return False
        self._cursors[name] = (segment, 0)
        return True

    def read_cursor(self, name: str, count: int) -> list[str]:
        segment, at = self._cursors[name]
        self._cursors[name] = (segment, at + count)
        return sorted(segment.vectors)[at : at + count]

    def close_cursor(self, name: str) -> None:
        entry = self._cursors.pop(name, None)
        if entry is not None:
            self._registry.unpin(entry[0])

    def close_all(self) -> None:
        self._cursors.clear()
