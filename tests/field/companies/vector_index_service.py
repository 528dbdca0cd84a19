"""Vector index service: segment handles are reference counted, scratch comes from an arena."""
import heapq
import threading
from typing import NamedTuple

import numpy as np


class Hit(NamedTuple):
    score: float
    doc: int


class Segment:
    def __init__(self, seg_id, vectors, ids):
        self.seg_id = seg_id
        self.vectors = vectors
        self.ids = ids
        self.refs = 1
        self.dropped = False
        self._mu = threading.Lock()

    def inc_ref(self):
        with self._mu:  # clean: with releases
            self.refs += 1
        return self

    def dec_ref(self):
        self._mu.acquire()  # clean: released before the unlink
        self.refs -= 1
        dead = self.refs == 0
        self._mu.release()
        if dead:
            self.vectors = None
            self.dropped = True


class ScratchArena:
    def __init__(self, rows, count):
        self._free = [np.empty(rows, dtype=np.float32) for _ in range(count)]

    def take(self):
        return self._free.pop() if self._free else np.empty(0, dtype=np.float32)  # clean: the result is the buffer

    def return_(self, arr):
        if arr.size:
            self._free.append(arr)


class Snapshot:
    """A consistent view: holds one reference on each of its segments."""

    def __init__(self, segments):
        self.segments = [s.inc_ref() for s in segments]  # clean: release() drops them all

    def release(self):
        for s in self.segments:
            s.dec_ref()
        self.segments = []


class VectorIndex:
    def __init__(self, arena):
        self.arena = arena
        self.live = {}
        self.lock = threading.Lock()
        self.epoch = 0

    def snapshot(self):
        with self.lock:  # clean: with releases
            return Snapshot(list(self.live.values()))  # clean: handed to the caller

    def search(self, q, k):
        snap = self.snapshot()  # clean: released before the return
        heap = []
        for seg in snap.segments:
            scores = seg.vectors @ q
            for s, d in zip(scores, seg.ids):
                heapq.heappush(heap, Hit(float(s), int(d)))
                if len(heap) > k:
                    heapq.heappop(heap)
        snap.release()
        return sorted(heap, reverse=True)

    def search_filtered(self, q, k, allow):
        snap = self.snapshot()  # leak: an empty allow list returns with the snapshot
        if not allow:
            return []
        hits = []
        for seg in snap.segments:
            mask = np.isin(seg.ids, allow)
            hits.extend(Hit(float(s), int(d)) for s, d in zip((seg.vectors @ q)[mask], seg.ids[mask]))
        snap.release()
        return heapq.nlargest(k, hits)

    def score_segment(self, seg_id, q):
        seg = self.live.get(seg_id)
        if seg is None:
            return None
        seg.inc_ref()  # clean: dropped in the finally
        try:
            if seg.dropped:
                return None
            return seg.vectors @ q
        finally:
            seg.dec_ref()

    def norm(self, seg_id):
        seg = self.live[seg_id].inc_ref()  # leak: the reference is not dropped when the segment is empty
        if len(seg.ids) == 0:
            return 0.0
        buf = self.arena.take()  # clean: returned below
        n = min(len(seg.ids), buf.size)
        buf[:n] = np.linalg.norm(seg.vectors[:n], axis=1)
        value = float(buf[:n].max(initial=0.0))
        self.arena.return_(buf)
        seg.dec_ref()
        return value

    def rerank(self, q, docs):
        buf = self.arena.take()  # clean: near miss, the slice is a view and the whole goes back
        work = buf[: len(docs)]
        work[:] = docs @ q
        order = np.argsort(-work)
        self.arena.return_(buf)
        return order

    def rerank_normalised(self, q, docs):
        buf = self.arena.take()  # leak: the normalised array replaces the taken one
        np.dot(docs, q, out=buf[: len(docs)])
        buf = buf / np.linalg.norm(q)
        order = np.argsort(-buf[: len(docs)])
        self.arena.return_(buf)
        return order

    def install(self, seg_id, vectors, ids):
        seg = Segment(seg_id, vectors, ids)
        self.lock.acquire()  # leak: the duplicate returns under the lock
        if seg_id in self.live:
            return False
        self.live[seg_id] = seg
        self.epoch += 1
        self.lock.release()
        return True

    def compact(self, a, b, new_id):
        left = self.live[a].inc_ref()  # clean: dropped at the end and on the mismatch
        right = self.live[b].inc_ref()  # leak: the dimension mismatch only drops the left one
        if left.vectors.shape[1] != right.vectors.shape[1]:
            left.dec_ref()
            raise ValueError("dimension mismatch")
        merged = Segment(new_id, np.vstack([left.vectors, right.vectors]), np.concatenate([left.ids, right.ids]))
        left.dec_ref()
        right.dec_ref()
        return merged

    def count(self):
        return sum(len(s.ids) for s in self.snapshot().segments)  # leak: the snapshot is never released

    def cursor(self, page):
        snap = self.snapshot()  # clean: near miss, the generator releases at the end of the pages and in close()
        try:
            for seg in snap.segments:
                for i in range(0, len(seg.ids), page):
                    yield seg.ids[i : i + page]
        finally:
            snap.release()
