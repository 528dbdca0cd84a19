"""Lock striping and admission permits for a shared prefix index."""
from __future__ import annotations

import threading
import time
from typing import Dict, List, Optional


class Stripes:
    def __init__(self, n: int = 16):
        self._locks = [threading.Lock() for _ in range(n)]

    def of(self, key: int) -> threading.Lock:
        return self._locks[key % len(self._locks)]


class Permits:
    """Counted permits with a non-blocking take."""

    def __init__(self, n: int):
        self._lock = threading.Lock()
        self._left = n
        self.closed = False

    def try_take(self) -> bool:
        with self._lock:
            if self.closed or self._left == 0:
                return False
            self._left -= 1  # clean: True tells the caller that a permit is owed
            return True

    def try_take_many(self, n: int) -> bool:
        """All n permits or none."""
        taken = 0
        with self._lock:
            while taken < n:
                if self.closed or self._left == 0:
                    break
                self._left -= 1  # leak: a partial count is kept although False is returned
                taken += 1
        return taken == n

    def put_back(self, n: int = 1) -> None:
        with self._lock:
            self._left += n


class PrefixIndex:
    def __init__(self, permits: Permits):
        self.stripes = Stripes()
        self.permits = permits
        self.nodes: Dict[int, List[int]] = {}

    def lookup(self, key: int) -> Optional[List[int]]:
        lock = self.stripes.of(key)
        lock.acquire()  # leak: the return for a missing node leaves the lock held
        node = self.nodes.get(key)
        if node is None:
            return None
        found = list(node)
        lock.release()
        return found

    def extend(self, key: int, tokens: List[int]) -> bool:
        lock = self.stripes.of(key)
        if not lock.acquire(timeout=0.5):  # clean: near miss, a False result holds nothing and finally covers the rest
            return False
        try:
            node = self.nodes.setdefault(key, [])
            if node[: len(tokens)] == tokens:
                return True
            node.extend(tokens)
            return True
        finally:
            lock.release()

    def prune(self, key: int, keep: int) -> bool:
        lock = self.stripes.of(key)
        if not lock.acquire(blocking=False):  # leak: nothing to prune returns before the try that releases
            return False
        node = self.nodes.get(key, [])
        if len(node) <= keep:
            return True
        try:
            del node[keep:]
        finally:
            lock.release()
        return True

    def sweep(self, keys: List[int], keep: int) -> int:
        swept = 0
        for key in keys:
            lock = self.stripes.of(key)
            if not lock.acquire(blocking=False):  # clean: near miss, the first continue holds nothing, the second releases
                continue
            node = self.nodes.get(key)
            if node is None:
                lock.release()
                continue
            del node[keep:]
            swept += 1
            lock.release()
        return swept

    def compact(self, keys: List[int]) -> int:
        moved = 0
        for key in keys:
            lock = self.stripes.of(key)
            lock.acquire()  # leak: the continue for a short node skips release
            node = self.nodes.get(key, [])
            if len(node) < 2:
                continue
            node.sort()
            moved += 1
            lock.release()
        return moved

    def insert(self, key: int, tokens: List[int]) -> bool:
        if key in self.nodes:
            return self.extend(key, tokens)
        if not self.permits.try_take():  # clean: near miss, a failed extend gives the permit back, drop does so otherwise
            return False
        if not self.extend(key, tokens):
            self.permits.put_back()
            return False
        return True

    def insert_new(self, key: int, tokens: List[int]) -> bool:
        if not self.permits.try_take():  # leak: a key that exists returns without giving the permit back
            return False
        if key in self.nodes:
            return False
        self.nodes[key] = list(tokens)
        return True

    def drop(self, key: int) -> None:
        """Undo of an insert."""
        if self.nodes.pop(key, None) is not None:
            self.permits.put_back()


def take_with_retry(permits: Permits, attempts: int, pause: float) -> bool:
    """True when a permit is now the caller's."""
    for _ in range(attempts):
        if permits.try_take():  # clean: near miss, the loop ends with the first success, which is reported
            return True
        time.sleep(pause)
    return False


def run_guarded(permits: Permits, job) -> bool:
    got = take_with_retry(permits, 3, 0.01)  # clean: near miss, given back under the same flag
    if got:
        job()
    if got:
        permits.put_back()
    return got


def run_measured(permits: Permits, job, timings: List[float]) -> bool:
    if not take_with_retry(permits, 3, 0.01):  # leak: the permit is returned only when the job took time
        return False
    start = time.monotonic()
    job()
    spent = time.monotonic() - start
    if spent > 0:
        timings.append(spent)
        permits.put_back()
    return True
