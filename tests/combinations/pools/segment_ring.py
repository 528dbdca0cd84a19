# take: P.next_segment()
# give: P.retire(X)
# gets: value
# type: AllReduceSegmentRing
import threading


class Segment:
    def __init__(self, index, view):
        self.index = index
        self.view = view
        self.busy = False


class AllReduceSegmentRing:
    """Ring of communication segments, retired in any order, handed out in ring order."""

    def __init__(self, storage, segment_len, n):
        self.n = n
        self.head = 0
        self._segs = [
            Segment(i, storage[i * segment_len:(i + 1) * segment_len]) for i in range(n)
        ]
        self._lock = threading.Lock()
        self.stats = {"handed": 0, "overruns": 0}

    def next_segment(self):
        with self._lock:
            seg = self._segs[self.head % self.n]
            if seg.busy:
                self.stats["overruns"] += 1
                raise BufferError(f"segment {seg.index} still in flight")
            seg.busy = True
            self.head += 1
            self.stats["handed"] += 1
            return seg

    def retire(self, seg):
        with self._lock:
            if not seg.busy:
                raise ValueError(f"segment {seg.index} retired twice")
            seg.busy = False
