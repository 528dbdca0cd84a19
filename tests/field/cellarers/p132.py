"""Byte-range locks of a file server."""
import bisect


class RangeLocks:
    def __init__(self):
        self._ranges = []

    def lock_range(self, lo, hi):
        i = bisect.bisect_left(self._ranges, (lo, hi))
        if i > 0 and self._ranges[i - 1][1] > lo:
            return None
        if i < len(self._ranges) and self._ranges[i][0] < hi:
            return None
        rng = (lo, hi)
        self._ranges.insert(i, rng)
        return rng

    def unlock_range(self, rng):
        i = bisect.bisect_left(self._ranges, rng)
        if i < len(self._ranges) and self._ranges[i] == rng:
            del self._ranges[i]


class FileServer:
    def __init__(self, locks, f):
        self.locks = locks
        self.f = f

    def write_at(self, pos, data):
        rng = self.locks.lock_range(pos, pos + len(data))  # clean: unlocked in finally
        if rng is None:
            return 0
        try:
            self.f.seek(pos)
            return self.f.write(data)
        finally:
            self.locks.unlock_range(rng)

    def move(self, src, dst, n):
        a = self.locks.lock_range(src, src + n)  # leak: no target range, and the source stays locked
        if a is None:
            return False
        b = self.locks.lock_range(dst, dst + n)  # clean: unlocked after the copy
        if b is None:
            return False
        self.f.seek(src)
        data = self.f.read(n)
        self.f.seek(dst)
        self.f.write(data)
        self.locks.unlock_range(b)
        self.locks.unlock_range(a)
        return True

    def lock_record(self, no, size=128):
        return self.locks.lock_range(no * size, (no + 1) * size)  # clean: handed to the caller

    def bump(self, no):
        rng = self.lock_record(no)  # leak: only the first branch unlocks
        if rng is None:
            return None
        self.f.seek(rng[0])
        value = int.from_bytes(self.f.read(8), "little")
        if value == 0:
            self.locks.unlock_range(rng)
        return value
