"""Per-shard locks and a global IO budget for the optimizer state store."""
from __future__ import annotations

import collections
import mmap
import os
import threading
from typing import Callable, Iterable, Optional

import numpy as np


class LatchBook:
    """One lock per key, dropped from the book when nobody wants it."""

    def __init__(self) -> None:
        self._mu = threading.Lock()
        self._latches: dict[str, threading.Lock] = {}
        self._wanted: collections.Counter[str] = collections.Counter()

    def latch(self, key: str) -> None:
        with self._mu:
            lk = self._latches.setdefault(key, threading.Lock())
            self._wanted[key] += 1
        lk.acquire()  # clean: near miss, held for the caller until unlatch

    def latch_soon(self, key: str, timeout: float) -> bool:
        with self._mu:
            lk = self._latches.setdefault(key, threading.Lock())
            self._wanted[key] += 1
        if lk.acquire(timeout=timeout):  # clean: near miss, True tells the caller it holds it
            return True
        self._forget(key)
        return False

    def unlatch(self, key: str) -> None:
        self._latches[key].release()
        self._forget(key)

    def _forget(self, key: str) -> None:
        with self._mu:
            self._wanted[key] -= 1
            if not self._wanted[key]:
                del self._wanted[key], self._latches[key]


class StateStore:
    def __init__(self, root: str, budget: int) -> None:
        self.root = root
        self.book = LatchBook()
        self.budget = threading.Semaphore(budget)
        self.cache: dict[str, np.ndarray] = {}
        self.maintenance = threading.Lock()

    def _path(self, key: str) -> str:
        return os.path.join(self.root, key + ".npy")

    def read(self, key: str) -> Optional[np.ndarray]:
        self.book.latch(key)  # leak: a cache hit returns with the key latched
        hit = self.cache.get(key)
        if hit is not None:
            return hit
        arr = np.load(self._path(key)) if os.path.exists(self._path(key)) else None
        if arr is not None:
            self.cache[key] = arr
        self.book.unlatch(key)
        return arr

    def write(self, key: str, arr: np.ndarray) -> None:
        self.book.latch(key)  # clean: finally unlatches
        try:
            self.budget.acquire()  # clean: inner finally releases
            try:
                np.save(self._path(key), arr)
                self.cache[key] = arr
            finally:
                self.budget.release()
        finally:
            self.book.unlatch(key)

    def try_write(self, key: str, arr: np.ndarray) -> bool:
        if not self.book.latch_soon(key, 0.5):  # leak: exhausted budget returns with the key latched
            return False
        if not self.budget.acquire(blocking=False):  # clean: near miss, not held on False; released below
            return False
        try:
            np.save(self._path(key), arr)
        finally:
            self.budget.release()
            self.book.unlatch(key)
        return True

    def evict(self, keys: Iterable[str]) -> int:
        n = 0
        for key in keys:
            if not self.book.latch_soon(key, 0.0):  # clean: near miss, busy keys are skipped unheld
                continue
            n += self.cache.pop(key, None) is not None
            self.book.unlatch(key)
        return n

    def swap(self, a: str, b: str) -> None:
        first, second = sorted((a, b))
        if first == second:
            return
        self.book.latch(first)  # clean: unlatched at the end
        self.book.latch(second)  # clean: unlatched at the end
        self.cache[a], self.cache[b] = self.cache.get(b), self.cache.get(a)
        self.book.unlatch(second)
        self.book.unlatch(first)

    def latch_all(self, keys: list[str], timeout: float) -> bool:
        """All keys or none."""
        held: list[str] = []
        for key in sorted(set(keys)):
            if not self.book.latch_soon(key, timeout):  # clean: near miss, failure unwinds held; success is caller's
                for k in reversed(held):
                    self.book.unlatch(k)
                return False
            held.append(key)
        return True

    def reshard(self, keys: list[str], fn: Callable[[np.ndarray], np.ndarray]) -> bool:
        if not self.latch_all(keys, 1.0):  # leak: empty shard breaks before the later keys are unlatched
            return False
        for key in sorted(set(keys)):
            arr = self.cache.get(key)
            if arr is None:
                self.book.unlatch(key)
                break
            self.cache[key] = fn(arr)
            self.book.unlatch(key)
        return True

    def compact(self) -> bool:
        if self.maintenance.locked():
            return False
        self.maintenance.acquire()  # leak: nothing to compact returns with the lock held
        dead = [k for k in self.cache if not os.path.exists(self._path(k))]
        if not dead:
            return False
        for k in dead:
            self.cache.pop(k)
        self.maintenance.release()
        return True


def peek_header(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)  # leak: a short file returns with the descriptor open
    if os.fstat(fd).st_size < 128:
        return b""
    with mmap.mmap(fd, 128, access=mmap.ACCESS_READ) as m:  # clean: with closes the map
        head = m[:128]
    os.close(fd)
    return head
