from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Optional

from .handles import HandleCache, ShardHandle


class ByteBudget:
    def __init__(self, total: int) -> None:
        self._left = total
        self._cv = threading.Condition()

    def charge(self, n: int, timeout: Optional[float] = None) -> bool:
        with self._cv:
            if not self._cv.wait_for(lambda: self._left >= n, timeout):
                return False
            self._left -= n
            return True

    def refund(self, n: int) -> None:
        with self._cv:
            self._left += n
            self._cv.notify_all()


@dataclass
class Fetched:
    data: bytes
    charged: int


class Prefetcher:
    def __init__(self, cache: HandleCache, budget: ByteBudget) -> None:
        self.cache = cache
        self.budget = budget
        self._ready: deque[Fetched] = deque()

    def fetch(self, path: str, i: int) -> bool:
        h = self.cache.use(path)  # leak: a budget that is exhausted returns False with the handle in use
        if h is None:
            return False
        size = h.index[i + 1] - h.index[i]
        if not self.budget.charge(size, timeout=5.0):  # clean: near miss, the charge travels in Fetched and next or drop refunds it
            return False
        self._ready.append(Fetched(h.record(i), size))
        self.cache.unuse(h)
        return True

    def fetch_all(self, path: str) -> int:
        h = self.cache.use(path)  # clean: near miss, unused on the exhausted budget as well as at the end
        if h is None:
            return 0
        if not self.budget.charge(h.index[-1], timeout=5.0):  # leak: the charge covers the file header too, the records refund only their own sizes
            self.cache.unuse(h)
            return 0
        for i in range(len(h)):
            self._ready.append(Fetched(h.record(i), h.index[i + 1] - h.index[i]))
        self.cache.unuse(h)
        return len(h)

    def next(self) -> Optional[bytes]:
        if not self._ready:
            return None
        item = self._ready.popleft()
        self.budget.refund(item.charged)
        return item.data

    def next_longer_than(self, n: int) -> Optional[bytes]:
        while self._ready:
            item = self._ready.popleft()
            self.budget.refund(item.charged)
            if len(item.data) <= n:
                continue
            return item.data
        return None

    def drop(self) -> None:
        while self._ready:
            self.budget.refund(self._ready.popleft().charged)
