"""Pins regions ahead of a reader."""
import threading

from .regions import BudgetExceeded


class Prefetcher:
    def __init__(self, cache, path, ahead, regions):
        self.cache = cache
        self.path = path
        self.ahead = ahead
        self.count = regions
        self.window = {}
        self.lock = threading.Lock()
        self.late = 0

    def _forget_before(self, index):
        self.window = {i: r for i, r in self.window.items() if i >= index}

    def advance(self, index):
        """The reader is at `index`: forget what lies behind it, pin what lies before it."""
        with self.lock:
            self._forget_before(index)
            for i in range(index, min(index + self.ahead, self.count)):
                if i in self.window:
                    continue
                try:
                    self.window[i] = self.cache.pin(self.path, i)  # leak: _forget_before() rebuilds the window and does not unpin what it leaves out
                except BudgetExceeded:
                    self.late += 1
                    break

    def get(self, index):
        with self.lock:
            region = self.window.pop(index, None)
        if region is None:
            region = self.cache.pin(self.path, index)  # clean: near miss, unpinned below whoever pinned it
        data = bytes(region.data)
        self.cache.unpin(region)
        return data

    def close(self):
        with self.lock:
            for region in self.window.values():
                self.cache.unpin(region)
            self.window.clear()


def scan(cache, path, regions, visit, step=1):
    """Every step-th region, for estimates of the token statistics."""
    ahead = Prefetcher(cache, path, 4, regions)
    try:
        for i in range(0, regions, step):
            ahead.advance(i)
            visit(ahead.get(i))
    finally:
        ahead.close()
