"""Pools with eviction policies for cached KV segments. The interesting part is the pools' own bookkeeping."""
from __future__ import annotations

import heapq
import itertools
import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional, Tuple

import torch

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Segment:
    sid: int
    data: torch.Tensor
    pinned: int = 0
    dirty: bool = False
    tags: List[str] = field(default_factory=list)


class LruSegmentPool:
    def __init__(self, n: int, elems: int) -> None:
        self.idle: Deque[Segment] = deque(Segment(i, torch.zeros(elems)) for i in range(n))
        self.cached: "OrderedDict[str, Segment]" = OrderedDict()

    def get_segment(self) -> Optional[Segment]:
        if self.idle:
            return self.idle.popleft()
        return self._evict()

    def _evict(self) -> Optional[Segment]:
        for key in list(self.cached):
            seg = self.cached.pop(key)  # clean: near miss, a pinned one is put in again, another one is returned
            if seg.pinned:
                self.cached[key] = seg
                continue
            return seg
        return None

    def evict_clean(self) -> Optional[Segment]:
        while self.cached:
            _, seg = self.cached.popitem(last=False)  # leak: dirty segments leave the cache and go nowhere
            if seg.dirty:
                logger.debug("segment %d is dirty", seg.sid)
                continue
            return seg
        return None

    def put_segment(self, seg: Segment, key: Optional[str] = None) -> None:
        if key is None:
            self.idle.append(seg)
            return
        old = self.cached.pop(key, None)
        if old is not None:
            self.idle.append(old)
        self.cached[key] = seg

    def resize(self, elems: int) -> int:
        n = 0
        for _ in range(len(self.idle)):
            seg = self.idle.popleft()  # clean: near miss, changed or not it is appended again
            if seg.data.numel() != elems:
                seg.data = torch.zeros(elems)
                n += 1
            self.idle.append(seg)
        return n

    def shrink(self, by: int) -> None:
        for _ in range(by):
            if not self.idle:
                return
            seg = self.idle.pop()  # leak: a tagged segment is meant to stay, but is not appended again
            if seg.tags:
                continue
            seg.data = torch.empty(0)
            self.put_segment(seg)


class HeapSegmentPool:
    """Smallest segment that fits."""

    def __init__(self, sizes: List[int]) -> None:
        self._tie = itertools.count()
        self._heap: List[Tuple[int, int, Segment]] = []
        for i, s in enumerate(sizes):
            self.push(Segment(i, torch.zeros(s)))

    def push(self, seg: Segment) -> None:
        heapq.heappush(self._heap, (seg.data.numel(), next(self._tie), seg))

    def fit(self, n: int) -> Optional[Segment]:
        small: List[Segment] = []
        found = None
        while self._heap:
            _, _, seg = heapq.heappop(self._heap)  # clean: near miss, those too small are pushed again below
            if seg.data.numel() >= n:
                found = seg
                break
            small.append(seg)
        for seg in small:
            self.push(seg)
        return found

    def fit_fast(self, n: int) -> Optional[Segment]:
        while self._heap:
            size, _, seg = heapq.heappop(self._heap)  # leak: every segment that is too small is lost on the way
            if size >= n:
                return seg
        return None


class SegmentUser:
    def __init__(self, pool: LruSegmentPool, heap: HeapSegmentPool) -> None:
        self.pool = pool
        self.heap = heap
        self.pins: Dict[str, Segment] = {}

    def cache(self, key: str, x: torch.Tensor) -> bool:
        seg = self.pool.get_segment()  # clean: near miss, put back bare when it does not fit, else cached
        if seg is None:
            return False
        if x.numel() > seg.data.numel():
            self.pool.put_segment(seg)
            return False
        seg.data[: x.numel()].copy_(x.flatten())
        self.pool.put_segment(seg, key)
        return True

    def cache_clean(self, key: str, x: torch.Tensor) -> bool:
        seg = self.pool.evict_clean()  # leak: the segment that is too small is not put back
        if seg is None or x.numel() > seg.data.numel():
            return False
        seg.data[: x.numel()].copy_(x.flatten())
        self.pool.put_segment(seg, key)
        return True

    def hold(self, key: str) -> Optional[Segment]:
        if key not in self.pins:
            seg = self.pool.get_segment()  # clean: in the table of pins until unhold
            if seg is None:
                return None
            seg.pinned += 1
            self.pins[key] = seg
        return self.pins[key]

    def unhold(self, key: str) -> None:
        seg = self.pins.pop(key, None)
        if seg is not None:
            seg.pinned -= 1
            self.pool.put_segment(seg)

    def reduce(self, xs: List[torch.Tensor]) -> float:
        seg = self.heap.fit(max(x.numel() for x in xs))  # clean: pushed back after the sum
        if seg is None:
            return float(sum(x.sum() for x in xs))
        seg.data.zero_()
        for x in xs:
            seg.data[: x.numel()] += x.flatten()
        s = float(seg.data.sum())
        self.heap.push(seg)
        return s

    def reduce_max(self, xs: List[torch.Tensor]) -> Optional[float]:
        seg = self.heap.fit(max(x.numel() for x in xs))  # leak: a NaN among the inputs returns at once
        if seg is None:
            return None
        seg.data.fill_(float("-inf"))
        for x in xs:
            if torch.isnan(x).any():
                return None
            head = seg.data[: x.numel()]
            torch.maximum(head, x.flatten(), out=head)
        m = float(seg.data.max())
        self.heap.push(seg)
        return m

    def exchange(self, n: int) -> int:
        big = self.heap.fit_fast(n)  # clean: pushed back at once
        if big is None:
            return 0
        size = big.data.numel()
        self.heap.push(big)
        return size
