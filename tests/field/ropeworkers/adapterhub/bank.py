"""Rank-bucketed weight rows on the device, and file handles of adapter archives."""

import collections
import threading


class RankBank:
    """Rows by rank: a row of rank 64 can serve an adapter of rank 16 but not the other way round."""

    RANKS = (8, 16, 32, 64)

    def __init__(self, per_rank):
        self.rows = {r: collections.deque((r, i) for i in range(per_rank)) for r in self.RANKS}
        self.lock = threading.RLock()

    def seat(self, rank):
        with self.lock:
            for r in self.RANKS:
                if r >= rank and self.rows[r]:
                    return self.rows[r].popleft()
        return None

    def unseat(self, row):
        with self.lock:
            self.rows[row[0]].append(row)

    def reseat(self, row, rank):
        """Exchange a row for one of a larger rank. The old row is taken back only on success."""
        bigger = self.seat(rank)  # clean: near miss, put back when it is no larger, else returned in place of `row`
        if bigger is None:
            return None
        if bigger[0] <= row[0]:
            self.unseat(bigger)
            return None
        self.unseat(row)
        return bigger


class ArchiveHandles:
    """Open adapter archives with a count of readers each."""

    def __init__(self, opener, limit):
        self.opener = opener
        self.limit = limit
        self.open_ = {}
        self.readers = collections.Counter()

    def enter(self, path):
        if path not in self.open_:
            if len(self.open_) >= self.limit and not self._close_idle():
                return None
            self.open_[path] = self.opener(path)  # clean: kept in open_, closed when it has no readers
        self.readers[path] += 1
        return self.open_[path]

    def leave(self, path):
        self.readers[path] -= 1

    def _close_idle(self):
        for path in list(self.open_):
            if not self.readers[path]:
                self.open_.pop(path).close()
                return True
        return False
