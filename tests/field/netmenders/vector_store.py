"""In-memory vector store: segments, read handles, scratch for distance matrices, compaction."""
from __future__ import annotations

import bisect
import itertools
import logging
import math
import threading
from typing import Callable, Iterator, List, Optional, Tuple

import torch

LOG = logging.getLogger("vecstore")


class SegmentGone(KeyError):
    pass


class Segment:
    def __init__(self, sid: int, dim: int, cap: int):
        self.sid = sid
        self.data = torch.empty(cap, dim)
        self.ids = torch.empty(cap, dtype=torch.long)
        self.used = 0
        self.sealed = False
        self.tombstones = 0

    def full(self) -> bool:
        return self.used >= self.data.shape[0]


class SegmentTable:
    """Reference-counted segments. open() raises SegmentGone, maybe_open() does not."""

    def __init__(self, dim: int, cap: int):
        self.dim, self.cap = dim, cap
        self._by_id: dict[int, Segment] = {}
        self._refs: dict[int, int] = {}
        self._dropped: set[int] = set()
        self._ids = itertools.count()
        self._mu = threading.RLock()

    def create(self) -> Segment:
        with self._mu:
            seg = Segment(next(self._ids), self.dim, self.cap)
            self._by_id[seg.sid] = seg
            self._refs[seg.sid] = 0
            return seg

    def open(self, sid: int) -> Segment:
        with self._mu:
            if sid not in self._by_id or sid in self._dropped:
                raise SegmentGone(sid)
            self._refs[sid] += 1
            return self._by_id[sid]

    def maybe_open(self, sid: int) -> Optional[Segment]:
        try:
            return self.open(sid)  # clean: handed to the caller
        except SegmentGone:
            return None

    def close(self, seg: Segment) -> None:
        with self._mu:
            self._refs[seg.sid] -= 1
            if self._refs[seg.sid] == 0 and seg.sid in self._dropped:
                self._forget(seg.sid)

    def drop(self, sid: int) -> None:
        with self._mu:
            self._dropped.add(sid)
            if self._refs.get(sid) == 0:
                self._forget(sid)

    def _forget(self, sid: int) -> None:
        self._by_id.pop(sid, None)
        self._refs.pop(sid, None)
        self._dropped.discard(sid)

    def sids(self) -> List[int]:
        with self._mu:
            return sorted(set(self._by_id) - self._dropped)


class DistanceScratch:
    """Size-classed scratch matrices; best fit over a sorted list of sizes."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._bufs: list[torch.Tensor] = []

    def grab(self, elems: int) -> torch.Tensor:
        i = bisect.bisect_left(self._sizes, elems)
        if i < len(self._sizes):
            self._sizes.pop(i)
            return self._bufs.pop(i)
        return torch.empty(1 << math.ceil(math.log2(max(elems, 2))))

    def toss(self, buf: torch.Tensor) -> None:
        i = bisect.bisect_left(self._sizes, buf.numel())
        self._sizes.insert(i, buf.numel())
        self._bufs.insert(i, buf)


class ScopedScratch:
    """with ScopedScratch(s, n) as buf: ..."""

    def __init__(self, scratch: DistanceScratch, elems: int):
        self.scratch, self.elems = scratch, elems

    def __enter__(self) -> torch.Tensor:
        self.buf = self.scratch.grab(self.elems)  # clean: tossed by __exit__ on every path
        return self.buf

    def __exit__(self, *exc) -> bool:
        self.scratch.toss(self.buf)
        return False


class Index:
    def __init__(self, table: SegmentTable, scratch: DistanceScratch):
        self.table = table
        self.scratch = scratch
        self.writer: Optional[Segment] = None
        self._snapshots: dict[str, list[Segment]] = {}

    # -- writing

    def append(self, vid: int, vec: torch.Tensor) -> None:
        if self.writer is None or self.writer.full():
            if self.writer is not None:
                self.writer.sealed = True
                self.table.close(self.writer)
            self.writer = self.table.open(self.table.create().sid)  # clean: near miss, the former writer was closed above, shutdown() closes the last
        w = self.writer
        w.data[w.used] = vec
        w.ids[w.used] = vid
        w.used += 1

    def shutdown(self) -> None:
        if self.writer is not None:
            self.table.close(self.writer)
            self.writer = None
        for name in list(self._snapshots):
            self.release_snapshot(name)

    # -- reading

    def _distances(self, seg: Segment, q: torch.Tensor) -> torch.Tensor:
        """1 x used distances in the head of a scratch buffer, which the caller tosses."""
        buf = self.scratch.grab(seg.used)  # clean: returned to the caller
        torch.matmul(seg.data[: seg.used], q, out=buf[: seg.used])
        return buf

    def search(self, q: torch.Tensor, k: int) -> List[Tuple[float, int]]:
        found: List[Tuple[float, int]] = []
        for sid in self.table.sids():
            seg = self.table.maybe_open(sid)  # leak: an empty segment is skipped while open
            if seg is None:
                continue
            if seg.used == 0:
                continue
            d = self._distances(seg, q)  # clean: tossed after topk
            top = d[: seg.used].topk(min(k, seg.used))
            found.extend((float(v), int(seg.ids[i])) for v, i in zip(top.values, top.indices))
            self.scratch.toss(d)
            self.table.close(seg)
        return sorted(found, reverse=True)[:k]

    def search_segment(self, sid: int, q: torch.Tensor) -> Optional[int]:
        try:
            seg = self.table.open(sid)  # clean: near miss, where it raises nothing was opened, else finally closes
        except SegmentGone:
            return None
        try:
            if seg.used == 0:
                return None
            with ScopedScratch(self.scratch, seg.used) as buf:  # clean: with statement
                torch.matmul(seg.data[: seg.used], q, out=buf[: seg.used])
                return int(seg.ids[int(buf[: seg.used].argmax())])
        finally:
            self.table.close(seg)

    def best_distance(self, sid: int, q: torch.Tensor) -> float:
        seg = self.table.open(sid)  # clean: closed after the maximum
        best = float(self._distances(seg, q)[: seg.used].max()) if seg.used else float("-inf")  # leak: the scratch buffer is reduced and dropped
        self.table.close(seg)
        return best

    def scan(self, keep: Callable[[torch.Tensor], bool]) -> Iterator[int]:
        for sid in self.table.sids():
            seg = self.table.maybe_open(sid)  # clean: near miss, finally closes it even when the generator is closed early
            if seg is None:
                continue
            try:
                for i in range(seg.used):
                    if keep(seg.data[i]):
                        yield int(seg.ids[i])
            finally:
                self.table.close(seg)

    def first_match(self, keep: Callable[[torch.Tensor], bool]) -> Optional[int]:
        for sid in self.table.sids():
            seg = self.table.maybe_open(sid)  # leak: the segment with the match is not closed on return
            if seg is None:
                continue
            for i in range(seg.used):
                if keep(seg.data[i]):
                    return int(seg.ids[i])
            self.table.close(seg)
        return None

    def snapshot(self, name: str) -> int:
        segs: list[Segment] = []
        for sid in self.table.sids():
            seg = self.table.maybe_open(sid)  # clean: near miss, kept in _snapshots, or closed when the name is in use
            if seg is not None:
                segs.append(seg)
        if name in self._snapshots:
            for seg in segs:
                self.table.close(seg)
            return 0
        self._snapshots[name] = segs
        return len(segs)

    def release_snapshot(self, name: str) -> None:
        for seg in self._snapshots.pop(name, []):
            self.table.close(seg)

    # -- compaction

    def merge(self, left: int, right: int) -> Optional[int]:
        a = self.table.open(left)  # leak: open when the merged size does not fit
        b = self.table.maybe_open(right)  # leak: open when the merged size does not fit
        if b is None:
            self.table.close(a)
            return None
        if a.used + b.used > self.table.cap:
            LOG.debug("segments %d and %d are too large to merge", left, right)
            return None
        target = self.table.open(self.table.create().sid)  # clean: closed after the copy
        target.data[: a.used] = a.data[: a.used]
        target.ids[: a.used] = a.ids[: a.used]
        target.data[a.used : a.used + b.used] = b.data[: b.used]
        target.ids[a.used : a.used + b.used] = b.ids[: b.used]
        target.used = a.used + b.used
        target.sealed = True
        for seg in (a, b):
            self.table.close(seg)
            self.table.drop(seg.sid)
        self.table.close(target)
        return target.sid
