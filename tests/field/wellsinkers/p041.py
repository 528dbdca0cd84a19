"""Ranges of sectors, first fit, with neighbours joined on return."""
import bisect


class Extents:
    def __init__(self, total):
        self._starts = [0]
        self._lengths = {0: total}

    def allot(self, n):
        for start in self._starts:
            length = self._lengths[start]
            if length >= n:
                self._starts.remove(start)
                del self._lengths[start]
                if length > n:
                    self._insert(start + n, length - n)
                return range(start, start + n)
        return None

    def _insert(self, start, length):
        bisect.insort(self._starts, start)
        self._lengths[start] = length

    def relinquish(self, extent):
        start, length = extent.start, len(extent)
        after = self._lengths.pop(extent.stop, 0)
        if after:
            self._starts.remove(extent.stop)
        i = bisect.bisect_left(self._starts, start) - 1
        if i >= 0 and self._starts[i] + self._lengths[self._starts[i]] == start:
            start = self._starts.pop(i)
            length += self._lengths.pop(start)
        self._insert(start, length + after)


class Volume:
    def __init__(self, extents, disk):
        self.extents = extents
        self.disk = disk
        self.files = {}

    def write(self, name, blocks):
        extent = self.extents.allot(len(blocks))  # leak: a disk error leaves the range
        if extent is None:
            return False
        if not self.disk.write(extent.start, blocks):
            return False
        self.files[name] = extent
        return True

    def delete(self, name):
        self.extents.relinquish(self.files.pop(name))

    def defrag(self, name):
        target = self.extents.allot(len(self.files[name]))  # clean: swapped in, the old returned
        if target is not None:
            self.disk.copy(self.files[name].start, target.start, len(target))
            self.extents.relinquish(self.files[name])
            self.files[name] = target


def bench(extents, disk, n):
    extent = extents.allot(n)  # clean: returned after the test
    if extent is not None:
        disk.write(extent.start, [b"\0" * 512] * n)
        extents.relinquish(extent)
