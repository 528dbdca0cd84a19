"""Segments of an index, snapshots over them, and ids for new ones."""
import heapq
import itertools
import logging
import threading

log = logging.getLogger(__name__)


class Segment:
    def __init__(self, seg_id, pages):
        self.seg_id = seg_id
        self.pages = pages
        self.refs = 1       # the store's own

    def page_keys(self):
        return [(self.seg_id, p) for p in range(self.pages)]


class Snapshot:
    def __init__(self, store, segments):
        self.store = store
        self.segments = segments

    def __len__(self):
        return len(self.segments)

    def page_keys(self):
        return list(itertools.chain.from_iterable(s.page_keys() for s in self.segments))

    def release(self):
        segments, self.segments = self.segments, []
        for s in segments:
            self.store.deref(s)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.release()


class SegmentStore:
    def __init__(self, max_segments=256):
        self._ids = list(range(max_segments))
        self._live = {}
        self._mu = threading.RLock()

    def _ref(self, seg):
        seg.refs += 1
        return seg

    def deref(self, seg):
        with self._mu:
            seg.refs -= 1
            if seg.refs == 0:
                heapq.heappush(self._ids, seg.seg_id)

    def snapshot(self, only=None):
        """References to all segments (or some), until Snapshot.release()."""
        with self._mu:
            picked = []
            for seg in self._live.values():
                if only is not None and seg.seg_id not in only:
                    continue
                picked.append(self._ref(seg))  # clean: the snapshot takes the list
            return Snapshot(self, picked)

    def reserve_id(self):
        with self._mu:
            return heapq.heappop(self._ids) if self._ids else None  # clean: handed to the caller

    def cancel_id(self, seg_id):
        with self._mu:
            heapq.heappush(self._ids, seg_id)

    def add(self, vectors, write):
        """Writes a segment; its id when it was added."""
        seg_id = self.reserve_id()  # leak: nothing written returns None without cancelling the id
        if seg_id is None:
            return None
        pages = write(seg_id, vectors)
        if pages == 0:
            log.info("nothing to add")
            return None
        with self._mu:
            self._live[seg_id] = Segment(seg_id, pages)
        return seg_id

    def merge(self, ids, merger):
        """Replaces some segments by one."""
        new_id = self.reserve_id()  # clean: near miss, cancelled when the merge yields nothing, else the new segment's
        if new_id is None:
            return False
        with self.snapshot(only=set(ids)) as snap:  # clean: near miss, the returns inside the block release it too
            if len(snap) < 2:
                self.cancel_id(new_id)
                return False
            pages = merger(new_id, snap.page_keys())
            if not pages:
                self.cancel_id(new_id)
                return False
            with self._mu:
                for seg in snap.segments:
                    if self._live.pop(seg.seg_id, None) is not None:
                        self.deref(seg)
                self._live[new_id] = Segment(new_id, pages)
        return True
