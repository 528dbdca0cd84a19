"""First-fit range allocator with merging; the lease is a small Range object."""
import bisect
from typing import NamedTuple


class Range(NamedTuple):
    start: int
    stop: int


class RangeAllocator:
    def __init__(self, size):
        self._free = [Range(0, size)]

    def claim(self, size):
        for i, r in enumerate(self._free):
            if r.stop - r.start >= size:
                cut = r.start + size
                self._free[i:i + 1] = [Range(cut, r.stop)] if cut < r.stop else []
                return Range(r.start, cut)
        return None

    def relinquish(self, r):
        bisect.insort(self._free, r)
        merged = self._free[:1]
        for x in self._free[1:]:
            if merged[-1].stop == x.start:
                merged[-1] = Range(merged[-1].start, x.stop)
            else:
                merged.append(x)
        self._free = merged


class KvRegions:
    def __init__(self, ranges: RangeAllocator, gpu):
        self.ranges = ranges
        self.gpu = gpu
        self.regions = {}

    def place(self, seq, size):
        r = self.ranges.claim(size)  # clean: remembered in regions, displace() relinquishes it
        if r is not None:
            self.regions[seq] = r

    def displace(self, seq):
        self.ranges.relinquish(self.regions.pop(seq))

    def enlarge(self, seq, size):
        old = self.regions[seq]
        new = self.ranges.claim(size)  # leak: a failed copy keeps the new range
        if new is None or not self.gpu.copy(old, new):
            return False
        self.regions[seq] = new
        self.ranges.relinquish(old)
        return True

    def zeroed(self, size, fn):
        r = self.ranges.claim(size)  # clean: finally
        if r is None:
            return None
        try:
            return fn(self.gpu.memset(r))
        finally:
            self.ranges.relinquish(r)

    def largest(self, sizes):
        for size in sorted(sizes, reverse=True):
            if self.ranges.claim(size) is not None:  # leak: the probe's range is dropped
                return size
        return 0
