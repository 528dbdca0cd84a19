"""Per-key lock table used by the online feature store writers."""
from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import Callable, Iterator


class KeyLock:
    __slots__ = ("mutex", "users")

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.users = 0


class LockTable:
    """Locks are created on demand and dropped once nobody uses them."""

    def __init__(self) -> None:
        self._table: dict[str, KeyLock] = {}
        self._guard = threading.Lock()

    def _ref(self, key: str) -> KeyLock:
        with self._guard:  # clean: with block
            entry = self._table.get(key)
            if entry is None:
                entry = self._table[key] = KeyLock()
            entry.users += 1  # clean: the reference belongs to the caller
            return entry

    def _unref(self, key: str) -> None:
        with self._guard:  # clean: with block
            entry = self._table[key]
            entry.users -= 1
            if entry.users == 0:
                del self._table[key]

    def lock(self, key: str, timeout: float = -1) -> bool:
        entry = self._ref(key)  # clean: near miss, kept with the mutex, dropped here if the wait times out
        if entry.mutex.acquire(timeout=timeout):  # clean: the caller holds the key, unlock() releases
            return True
        self._unref(key)
        return False

    def unlock(self, key: str) -> None:
        self._table[key].mutex.release()
        self._unref(key)

    @contextmanager
    def holding(self, key: str) -> Iterator[None]:
        self.lock(key)  # clean: released in finally
        try:
            yield
        finally:
            self.unlock(key)


class FeatureWriter:
    def __init__(self, locks: LockTable, backend: dict[str, dict]) -> None:
        self.locks = locks
        self.backend = backend
        self._held: list[str] = []

    def put(self, key: str, values: dict) -> None:
        with self.locks.holding(key):  # clean: with block
            row = self.backend.setdefault(key, {})
            row.update(values)

    def put_if_newer(self, key: str, values: dict, ts: float) -> bool:
        self.locks.lock(key)  # leak: stale writes return False with the key locked
        row = self.backend.setdefault(key, {"ts": 0.0})
        if row["ts"] >= ts:
            return False
        row.update(values)
        row["ts"] = ts
        self.locks.unlock(key)
        return True

    def move(self, src: str, dst: str) -> bool:
        if not self.locks.lock(src, timeout=1.0):  # leak: stays locked when dst cannot be locked
            return False
        if not self.locks.lock(dst, timeout=1.0):  # clean: unlocked below
            return False
        self.backend[dst] = self.backend.pop(src, {})
        self.locks.unlock(dst)
        self.locks.unlock(src)
        return True

    def begin(self, keys: list[str]) -> bool:
        """Lock all keys for a transaction; commit() or abort() ends it."""
        for key in sorted(set(keys)):
            if not self.locks.lock(key, timeout=0.5):  # clean: near miss, collected in _held, abort() unlocks what was taken
                self.abort()
                return False
            self._held.append(key)
        return True

    def commit(self, rows: dict[str, dict]) -> None:
        for key in self._held:
            if key in rows:
                self.backend[key] = rows[key]
        self.abort()

    def abort(self) -> None:
        while self._held:
            self.locks.unlock(self._held.pop())

    def expire(self, keys: list[str], older_than: float) -> int:
        removed = 0
        now = time.time()
        for key in keys:
            if not self.locks.lock(key, timeout=0.0):  # leak: continue for a missing row skips the unlock
                continue
            row = self.backend.get(key)
            if row is None:
                continue
            if now - row.get("ts", now) > older_than:
                del self.backend[key]
                removed += 1
            self.locks.unlock(key)
        return removed

    def compute_once(self, key: str, fn: Callable[[], dict]) -> dict:
        if key in self.backend:
            return self.backend[key]
        self.locks.lock(key)  # clean: near miss, both exits pass the finally
        try:
            if key in self.backend:
                return self.backend[key]
            row = self.backend[key] = fn()
            return row
        finally:
            self.locks.unlock(key)

    def update_with(self, key: str, fn: Callable[[dict], dict]) -> dict | None:
        self.locks.lock(key)  # leak: the handler swallows the error and returns without unlock
        try:
            row = fn(self.backend.get(key, {}))
        except (KeyError, ValueError):
            return None
        self.backend[key] = row
        self.locks.unlock(key)
        return row
