"""Segmented replay buffer: segments live in an arena and are pinned while somebody reads them."""
from __future__ import annotations

import collections
import heapq
import random
import threading
from typing import Dict, List, Optional, Sequence


class Segment:
    __slots__ = ("sid", "steps", "pins", "generation", "priority")

    def __init__(self, sid: int) -> None:
        self.sid = sid
        self.steps: list = []
        self.pins = 0
        self.generation = 0
        self.priority = 1.0


class SegmentArena:
    """pin() keeps a segment from being recycled; every pin needs one unpin()."""

    def __init__(self, capacity: int) -> None:
        self._segments = {i: Segment(i) for i in range(capacity)}
        self._mu = threading.Lock()
        self._recyclable: collections.deque = collections.deque()

    def pin(self, sid: int) -> Optional[Segment]:
        with self._mu:
            seg = self._segments.get(sid)
            if seg is None:
                return None
            seg.pins += 1
            return seg

    def unpin(self, seg: Segment) -> None:
        with self._mu:
            seg.pins -= 1
            if seg.pins == 0:
                self._recyclable.append(seg.sid)

    def ids(self) -> List[int]:
        with self._mu:
            return list(self._segments)


class PinnedView:
    """with PinnedView(arena, sid) as seg: ..."""

    def __init__(self, arena: SegmentArena, sid: int) -> None:
        self._arena = arena
        self._sid = sid
        self._seg: Optional[Segment] = None

    def __enter__(self) -> Optional[Segment]:
        self._seg = self._arena.pin(self._sid)  # clean: __exit__ unpins
        return self._seg

    def __exit__(self, kind, exc, tb) -> None:
        if self._seg is not None:
            self._arena.unpin(self._seg)
            self._seg = None


class CountingView:
    """Like PinnedView, and counts the reads of segments that were not empty."""

    reads = 0

    def __init__(self, arena: SegmentArena, sid: int) -> None:
        self.arena, self.sid = arena, sid
        self.seg: Optional[Segment] = None

    def __enter__(self) -> "CountingView":
        self.seg = self.arena.pin(self.sid)  # leak: __exit__ returns before the unpin for an empty segment
        return self

    def __exit__(self, kind, exc, tb) -> None:
        if self.seg is None:
            return
        if not self.seg.steps:
            return
        CountingView.reads += 1
        self.arena.unpin(self.seg)


def mean_reward(arena: SegmentArena, sid: int) -> float:
    with PinnedView(arena, sid) as seg:  # clean: the view unpins on exit
        if seg is None or not seg.steps:
            return 0.0
        return sum(step[1] for step in seg.steps) / len(seg.steps)


def segment_length(arena: SegmentArena, sid: int, generation: int) -> int:
    seg = arena.pin(sid)  # leak: a stale generation returns with the pin held
    if seg is None:
        return 0
    if seg.generation != generation:
        return -1
    n = len(seg.steps)
    arena.unpin(seg)
    return n


def pin_sample(arena: SegmentArena, k: int, rng: random.Random) -> List[Segment]:
    """The caller must unpin every segment of the answer."""
    chosen = []
    for sid in rng.sample(arena.ids(), k):
        seg = arena.pin(sid)  # clean: handed to the caller in the list
        if seg is not None:
            chosen.append(seg)
    return chosen


def learner_batch(arena: SegmentArena, k: int, rng: random.Random) -> list:
    segs = pin_sample(arena, k, rng)  # clean: all unpinned after the copy
    batch = [list(seg.steps) for seg in segs]
    for seg in segs:
        arena.unpin(seg)
    return batch


def priority_histogram(arena: SegmentArena, k: int, buckets: int) -> list:
    counts = [0] * buckets
    for seg in pin_sample(arena, k, random.Random(0)):  # leak: the list is read once and its pins stay
        slot = min(buckets - 1, int(seg.priority * buckets))
        counts[slot] += 1
    return counts


def non_empty_batch(arena: SegmentArena, k: int, rng: random.Random) -> list:
    segs = pin_sample(arena, k, rng)  # leak: the empty segments are filtered out before the unpin loop
    segs = [seg for seg in segs if seg.steps]
    batch = []
    for seg in segs:
        batch.append(seg.steps[-1])
        arena.unpin(seg)
    return batch


class PrefetchTable:
    """Segments pinned ahead of the learner, by the learner's step."""

    def __init__(self, arena: SegmentArena, depth: int) -> None:
        self.arena = arena
        self.depth = depth
        self._ahead: Dict[int, Segment] = {}
        self.hits = 0
        self.misses = 0

    def schedule(self, step: int, sid: int) -> bool:
        if step in self._ahead or len(self._ahead) >= self.depth:
            return False
        seg = self.arena.pin(sid)  # clean: near miss, consume() and close() unpin what the table has
        if seg is None:
            return False
        self._ahead[step] = seg
        return True

    def consume(self, step: int) -> list:
        seg = self._ahead.pop(step, None)
        if seg is None:
            self.misses += 1
            return []
        self.hits += 1
        steps = list(seg.steps)
        self.arena.unpin(seg)
        return steps

    def close(self) -> None:
        for seg in self._ahead.values():
            self.arena.unpin(seg)
        self._ahead.clear()


class HotSet:
    """The segments with the highest priority stay pinned. They leave by demote()."""

    def __init__(self, arena: SegmentArena, size: int) -> None:
        self.arena, self.size = arena, size
        self._hot: Dict[int, Segment] = {}

    def promote(self, sid: int) -> None:
        if sid in self._hot:
            return
        seg = self.arena.pin(sid)  # leak: demote() removes the entry and nothing unpins it
        if seg is None:
            return
        self._hot[sid] = seg
        if len(self._hot) > self.size:
            self.demote()

    def demote(self) -> None:
        coldest = heapq.nsmallest(1, self._hot.items(), key=lambda kv: kv[1].priority)
        for sid, seg in coldest:
            seg.priority *= 0.5
            del self._hot[sid]


def longest_segment(arena: SegmentArena, sids: Sequence[int]) -> Optional[Segment]:
    """Answers the longest segment, pinned."""
    best = None
    for sid in sids:
        seg = arena.pin(sid)  # clean: near miss, the loser of each comparison is unpinned
        if seg is None:
            continue
        if best is None:
            best = seg
        elif len(seg.steps) > len(best.steps):
            arena.unpin(best)
            best = seg
        else:
            arena.unpin(seg)
    return best


def dump_longest(arena: SegmentArena, sids: Sequence[int], path: str) -> bool:
    best = longest_segment(arena, sids)  # clean: unpinned after the dump
    if best is None:
        return False
    with open(path, "w") as out:  # clean: closed by with
        for step in best.steps:
            out.write(repr(step) + "\n")
    arena.unpin(best)
    return True
