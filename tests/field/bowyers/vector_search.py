"""Approximate nearest neighbour search over immutable segments."""
from __future__ import annotations

import heapq
import logging
import threading
from dataclasses import dataclass, field
from typing import Callable, Iterable, Optional, Protocol

log = logging.getLogger(__name__)


@dataclass
class VisitedSet:
    """Marks for one graph walk; `epoch` makes clearing cheap."""

    marks: list[int]
    epoch: int = 0

    def fresh(self) -> None:
        self.epoch += 1

    def see(self, node: int) -> bool:
        if self.marks[node] == self.epoch:
            return False
        self.marks[node] = self.epoch
        return True


class VisitedPool:
    def __init__(self, nodes: int, limit: int) -> None:
        self._nodes = nodes
        self._spare: list[VisitedSet] = [VisitedSet([0] * nodes) for _ in range(limit)]
        self._mu = threading.Lock()

    def borrow(self) -> Optional[VisitedSet]:
        with self._mu:
            if not self._spare:
                return None
            v = self._spare.pop()
        v.fresh()
        return v

    def give_back(self, v: VisitedSet) -> None:
        with self._mu:
            self._spare.append(v)


class Scorer(Protocol):
    def score(self, query: list[float], node: int) -> float: ...


@dataclass
class Segment:
    name: str
    graph: dict[int, list[int]]
    entry: int
    readers: int = 0
    doomed: bool = False

    def open_reader(self) -> bool:
        if self.doomed:
            return False
        self.readers += 1
        return True

    def close_reader(self) -> None:
        self.readers -= 1


class SegmentSet:
    """The live segments; a merge replaces several by one."""

    def __init__(self) -> None:
        self._live: list[Segment] = []
        self._mu = threading.Lock()

    def add(self, seg: Segment) -> None:
        with self._mu:
            self._live.append(seg)

    def acquire_all(self) -> list[Segment]:
        with self._mu:
            return [s for s in self._live if s.open_reader()]  # clean: handed to the caller when it said yes

    def release_all(self, segs: Iterable[Segment]) -> None:
        with self._mu:
            for s in segs:
                s.close_reader()

    def acquire_named(self, name: str) -> Optional[Segment]:
        with self._mu:
            for s in self._live:
                if s.name == name and s.open_reader():  # clean: handed to the caller when it said yes
                    return s
        return None

    def release(self, seg: Segment) -> None:
        with self._mu:
            seg.close_reader()

    def replace(self, old: list[Segment], new: Segment) -> None:
        with self._mu:
            self._live = [s for s in self._live if s not in old] + [new]
            for s in old:
                s.doomed = True


class Searcher:
    def __init__(self, segments: SegmentSet, visited: VisitedPool, scorer: Scorer) -> None:
        self.segments = segments
        self.visited = visited
        self.scorer = scorer
        self.fallbacks = 0

    def _walk(self, seg: Segment, query: list[float], k: int, seen: VisitedSet) -> list[tuple[float, int]]:
        frontier = [(-self.scorer.score(query, seg.entry), seg.entry)]
        best: list[tuple[float, int]] = []
        while frontier:
            negative, node = heapq.heappop(frontier)
            if len(best) == k and -negative < best[0][0]:
                break
            heapq.heappush(best, (-negative, node))
            if len(best) > k:
                heapq.heappop(best)
            for other in seg.graph.get(node, ()):
                if seen.see(other):
                    heapq.heappush(frontier, (-self.scorer.score(query, other), other))
        return best

    def search(self, query: list[float], k: int) -> list[tuple[float, int]]:
        segs = self.segments.acquire_all()  # clean: released in the finally
        try:
            hits: list[tuple[float, int]] = []
            for seg in segs:
                seen = self.visited.borrow()  # clean: given back each turn, nothing held when None
                if seen is None:
                    self.fallbacks += 1
                    continue
                hits += self._walk(seg, query, k, seen)
                self.visited.give_back(seen)
            return heapq.nlargest(k, hits)
        finally:
            self.segments.release_all(segs)

    def search_first(self, query: list[float], k: int, floor: float) -> list[tuple[float, int]]:
        """Stop at the first segment whose best hit clears the floor."""
        segs = self.segments.acquire_all()  # clean: released after the loop, which leaves by break
        seen = self.visited.borrow()  # leak: never given back when some hit clears the floor
        found: list[tuple[float, int]] = []
        if seen is not None:
            for seg in segs:
                seen.fresh()
                found = self._walk(seg, query, k, seen)
                if found and max(found)[0] >= floor:
                    break
            else:
                self.visited.give_back(seen)
        self.segments.release_all(segs)
        return found

    def search_named(self, name: str, query: list[float], k: int) -> Optional[list[tuple[float, int]]]:
        seg = self.segments.acquire_named(name)  # leak: not released when no visited set is spare
        if seg is None:
            return None
        seen = self.visited.borrow()  # clean: given back after the walk
        if seen is None:
            self.fallbacks += 1
            return []
        hits = self._walk(seg, query, k, seen)
        self.visited.give_back(seen)
        self.segments.release(seg)
        return hits

    def degree_histogram(self) -> dict[int, int]:
        histogram: dict[int, int] = {}
        for seg in self.segments.acquire_all():  # leak: the list of open readers is only iterated
            for neighbours in seg.graph.values():
                histogram[len(neighbours)] = histogram.get(len(neighbours), 0) + 1
        return histogram


@dataclass
class Cursor:
    """A paged search that the client continues; it holds its segments and marks."""

    query: list[float]
    segs: list[Segment]
    seen: VisitedSet
    at: int = 0
    hits: list[tuple[float, int]] = field(default_factory=list)


class CursorTable:
    def __init__(self, searcher: Searcher) -> None:
        self._searcher = searcher
        self._cursors: dict[int, Cursor] = {}
        self._next = 0

    def open_cursor(self, query: list[float]) -> Optional[int]:
        seen = self._searcher.visited.borrow()  # leak: close_cursor gives back the segments, never the marks
        if seen is None:
            return None
        segs = self._searcher.segments.acquire_all()  # clean: near miss, in the cursor until close_cursor
        self._next += 1
        self._cursors[self._next] = Cursor(query, segs, seen)
        return self._next

    def fetch(self, cursor_id: int, k: int) -> list[tuple[float, int]]:
        cur = self._cursors[cursor_id]
        if cur.at >= len(cur.segs):
            return []
        hits = self._searcher._walk(cur.segs[cur.at], cur.query, k, cur.seen)
        cur.at += 1
        cur.hits += hits
        return hits

    def close_cursor(self, cursor_id: int) -> int:
        cur = self._cursors.pop(cursor_id)
        self._searcher.segments.release_all(cur.segs)
        log.debug("cursor %d closed after %d hits", cursor_id, len(cur.hits))
        return len(cur.hits)


class Merger:
    """Merges small segments; readers of the victims stay open while it copies."""

    def __init__(self, segments: SegmentSet, on_done: Optional[Callable[[str], None]] = None) -> None:
        self._segments = segments
        self._on_done = on_done
        self._victims: list[Segment] = []

    def pick(self, names: list[str], small: int) -> int:
        for name in names:
            seg = self._segments.acquire_named(name)  # clean: near miss, let go, or kept for merge()
            if seg is None:
                continue
            if len(seg.graph) > small:
                self._segments.release(seg)
                continue
            self._victims.append(seg)
        return len(self._victims)

    def merge(self, into: str) -> Optional[Segment]:
        victims, self._victims = self._victims, []
        if len(victims) < 2:
            self._segments.release_all(victims)
            return None
        graph: dict[int, list[int]] = {}
        for seg in victims:
            graph.update(seg.graph)
        merged = Segment(into, graph, victims[0].entry)
        self._segments.replace(victims, merged)
        self._segments.release_all(victims)
        if self._on_done is not None:
            self._on_done(into)
        return merged


def compare(searcher: Searcher, a: str, b: str) -> Optional[float]:
    """Share of nodes that two segments have in common."""
    left = searcher.segments.acquire_named(a)  # clean: released on each of the three ways
    if left is None:
        return None
    right = searcher.segments.acquire_named(b)  # leak: the return for empty segments releases left only
    if right is None:
        searcher.segments.release(left)
        return None
    union = left.graph.keys() | right.graph.keys()
    if not union:
        searcher.segments.release(left)
        return 0.0
    share = len(left.graph.keys() & right.graph.keys()) / len(union)
    searcher.segments.release(right)
    searcher.segments.release(left)
    return share
