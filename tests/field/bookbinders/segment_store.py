"""On-disk vector segments. A segment is pinned while a query, an export or a merge reads it."""
from __future__ import annotations

import heapq
import logging
import threading
import time

import numpy as np

log = logging.getLogger("segstore")


class SegmentGone(Exception):
    pass


class CoverageError(Exception):
    pass


class Segment:
    def __init__(self, seg_id, path, rows, dim):
        self.seg_id, self.path, self.rows, self.dim = seg_id, path, rows, dim
        self.pins, self.retired, self._mat = 0, False, None

    def matrix(self):
        if self._mat is None:
            self._mat = np.fromfile(self.path, dtype=np.float32).reshape(self.rows, self.dim)
        return self._mat


class PinBoard:
    """Knows the live segments; pins keep the compactor from deleting one."""

    def __init__(self):
        self._lock = threading.Lock()
        self._segments = {}

    def add(self, seg):
        with self._lock:
            self._segments[seg.seg_id] = seg

    def live(self):
        with self._lock:
            return {s.seg_id: s.rows for s in self._segments.values() if not s.retired}

    def pin(self, seg_id):
        with self._lock:
            seg = self._segments.get(seg_id)
            if seg is None or seg.retired:
                raise SegmentGone(seg_id)
            seg.pins += 1
            return seg

    def unpin(self, seg):
        with self._lock:
            seg.pins -= 1
            if seg.pins == 0 and seg.retired:
                self._segments.pop(seg.seg_id, None)

    def retire(self, seg):
        with self._lock:
            seg.retired = True


class ScratchPool:
    """Float matrices that hold the distances of one query batch."""

    def __init__(self, count, queries, rows):
        self._cond = threading.Condition()
        self._free = [np.empty((queries, rows), dtype=np.float32) for _ in range(count)]
        self.waits = 0

    def take(self, timeout=5.0):
        deadline = time.monotonic() + timeout
        with self._cond:
            while not self._free:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self.waits += 1
                self._cond.wait(left)
            return self._free.pop()  # clean: the matrix goes to the caller

    def put(self, mat):
        with self._cond:
            self._free.append(mat)
            self._cond.notify()


def pin_all(board, ids):
    pinned = []
    for seg_id in ids:
        try:
            pinned.append(board.pin(seg_id))  # clean: the list goes to the caller
        except SegmentGone:
            log.debug("segment %s went away", seg_id)
    return pinned


def distances(seg, queries, out):
    return np.matmul(queries, seg.matrix().T, out=out[: len(queries), : seg.rows])


def scan_segment(board, scratch, seg_id, queries, k):
    seg = board.pin(seg_id)  # leak: when no scratch comes in time, the return leaves the segment pinned
    mat = scratch.take()  # clean: put back in the finally
    if mat is None:
        log.warning("no scratch for %s, segment skipped", seg_id)
        return []
    try:
        view = distances(seg, queries, mat)
        top = np.argpartition(-view, k, axis=1)[:, :k]
        return [(seg_id, row) for row in top]
    finally:
        scratch.put(mat)
        board.unpin(seg)


def merge_into(heap, seg, queries, mat, scratch, k):
    try:
        view = distances(seg, queries, mat)
        for row in np.argsort(-view[0])[:k]:
            heapq.heappush(heap, (-float(view[0, row]), seg.seg_id, int(row)))
    finally:
        scratch.put(mat)


class Searcher:
    def __init__(self, board, scratch):
        self._board, self._scratch = board, scratch
        self.degraded = 0

    def search(self, query, k, min_coverage=0.8):
        live = self._board.live()
        pinned = pin_all(self._board, live)  # leak: CoverageError is raised before the try that unpins
        covered = sum(s.rows for s in pinned) / max(1, sum(live.values()))
        if covered < min_coverage:
            self.degraded += 1
            raise CoverageError("only %.2f of the rows can be read" % covered)
        heap = []
        try:
            for seg in pinned:
                mat = self._scratch.take()  # clean: near miss, merge_into() puts it back
                if mat is None:
                    continue
                merge_into(heap, seg, query[None, :], mat, self._scratch, k)
        finally:
            for seg in pinned:
                self._board.unpin(seg)
        return heapq.nsmallest(k, heap)


class Cursor:
    """Walks over the rows of several segments, one of them pinned at a time."""

    def __init__(self, board, ids):
        self._board, self._ids, self._pos = board, list(ids), 0
        self._seg = board.pin(self._ids[0])  # leak: advance() rebinds _seg and the first segment stays pinned

    def advance(self):
        self._pos += 1
        if self._pos >= len(self._ids):
            return False
        self._seg = self._board.pin(self._ids[self._pos])  # leak: the next advance() binds another over it
        return True

    def rows(self):
        return self._seg.matrix()

    def close(self):
        if self._seg is not None:
            self._board.unpin(self._seg)
            self._seg = None


def column_means(board, ids):
    cur = Cursor(board, ids)  # clean: closed in the finally
    try:
        parts = [cur.rows().mean(axis=0)]
        while cur.advance():
            parts.append(cur.rows().mean(axis=0))
    finally:
        cur.close()
    return np.mean(parts, axis=0)


class Snapshot:
    """Segments pinned together and shared by several readers."""

    def __init__(self, board, ids):
        self._board, self._lock, self._refs = board, threading.Lock(), 1
        self.segments = pin_all(board, ids)  # clean: near miss, the last release() unpins every one

    def retain(self):
        with self._lock:
            self._refs += 1
        return self

    def release(self):
        with self._lock:
            self._refs -= 1
            if self._refs > 0:
                return
            segs, self.segments = self.segments, []
        for seg in segs:
            self._board.unpin(seg)


def _export_shard(snap, n, shards, sink):
    try:
        for seg in snap.segments[n::shards]:
            sink.write(seg.seg_id, seg.matrix())
    finally:
        snap.release()


def export_rows(board, sink, shards=4):
    snap = Snapshot(board, board.live())  # clean: near miss, the shards have their own references and this one goes in the finally
    threads = []
    try:
        for n in range(shards):
            mine = snap.retain()  # clean: near miss, released at the end of the shard's thread
            t = threading.Thread(target=_export_shard, args=(mine, n, shards, sink), daemon=True)
            t.start()
            threads.append(t)
        for t in threads:
            t.join()
    finally:
        snap.release()


class Compactor(threading.Thread):
    def __init__(self, board, writer, period=30.0):
        super().__init__(daemon=True)
        self._board, self._writer, self._period = board, writer, period
        self._halt = threading.Event()

    def _merge_pair(self, left_id, right_id):
        left = self._board.pin(left_id)  # leak: the pin of the right one raises SegmentGone, which run() swallows
        right = self._board.pin(right_id)  # clean: unpinned in the finally
        try:
            merged = self._writer.concat(left.matrix(), right.matrix())
            self._board.add(merged)
            self._board.retire(left)
            self._board.retire(right)
        finally:
            self._board.unpin(right)
            self._board.unpin(left)

    def run(self):
        while not self._halt.wait(self._period):
            ids = sorted(self._board.live())
            if len(ids) < 2:
                continue
            try:
                self._merge_pair(ids[0], ids[1])
            except SegmentGone as e:
                log.info("merge given up: %s", e)
