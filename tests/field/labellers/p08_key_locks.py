"""Per-key locks and a lock manager for a sharded metadata store."""
from __future__ import annotations

import threading
from typing import Callable, Dict, List, Optional


class KeyLockTable:
    def __init__(self, stripes: int = 16) -> None:
        self._stripes = [threading.Lock() for _ in range(stripes)]
        self._owners: Dict[int, str] = {}

    def _stripe(self, key: str) -> int:
        return hash(key) % len(self._stripes)

    def lock(self, key: str) -> None:
        idx = self._stripe(key)
        self._stripes[idx].acquire()  # clean: lock() leaves the stripe locked for its caller, unlock() releases it
        self._owners[idx] = key

    def try_lock(self, key: str, timeout: float = 0.0) -> bool:
        idx = self._stripe(key)
        if not self._stripes[idx].acquire(timeout=timeout):  # clean: near miss, False means nothing is held, True is told to the caller
            return False
        self._owners[idx] = key
        return True

    def try_lock_fresh(self, key: str) -> bool:
        idx = self._stripe(key)
        if not self._stripes[idx].acquire(blocking=False):  # leak: the stripe stays locked when False is returned for a repeated key
            return False
        if self._owners.get(idx) == key:
            return False
        self._owners[idx] = key
        return True

    def unlock(self, key: str) -> None:
        self._stripes[self._stripe(key)].release()


class MetaStore:
    def __init__(self, locks: KeyLockTable) -> None:
        self.locks = locks
        self.rows: Dict[str, Dict[str, str]] = {}
        self.tombstones: Dict[str, bool] = {}
        self.guard = threading.Lock()

    def update(self, key: str, column: str, value: str) -> bool:
        self.locks.lock(key)  # leak: returns for a missing row without unlocking
        row = self.rows.get(key)
        if row is None:
            return False
        row[column] = value
        self.locks.unlock(key)
        return True

    def upsert(self, key: str, column: str, value: str) -> bool:
        self.locks.lock(key)  # clean: near miss, the early return inside try is covered by finally
        try:
            if self.tombstones.get(key):
                return False
            self.rows.setdefault(key, {})[column] = value
            return True
        finally:
            self.locks.unlock(key)

    def touch_all(self, keys: List[str], stamp: str) -> int:
        n = 0
        for key in keys:
            if not self.locks.try_lock(key):  # clean: near miss, continue only where the lock was not obtained
                continue
            self.rows.setdefault(key, {})["touched"] = stamp
            self.locks.unlock(key)
            n += 1
        return n

    def sweep(self, keys: List[str]) -> int:
        n = 0
        for key in keys:
            if not self.locks.try_lock(key, 0.05):  # leak: break at the sweep limit leaves the last key locked
                continue
            if self.tombstones.pop(key, False):
                self.rows.pop(key, None)
                n += 1
            if n >= 64:
                break
            self.locks.unlock(key)
        return n

    def rename(self, old: str, new: str) -> bool:
        lo, hi = sorted((old, new))
        self.locks.lock(lo)  # leak: not unlocked when the second key cannot be locked
        if not self.locks.try_lock(hi, 1.0):  # clean: both early outs hold nothing of it, the end unlocks it
            return False
        row = self.rows.pop(old, None)
        if row is not None:
            self.rows[new] = row
        self.locks.unlock(hi)
        self.locks.unlock(lo)
        return row is not None

    def copy_row(self, src: str, dst: str) -> bool:
        lo, hi = sorted((src, dst))
        self.locks.lock(lo)  # clean: unlocked on the failure of the second and at the end
        if not self.locks.try_lock(hi, 1.0):  # clean: near miss, its only early return is where it was not obtained
            self.locks.unlock(lo)
            return False
        self.rows[dst] = dict(self.rows.get(src, {}))
        self.locks.unlock(hi)
        self.locks.unlock(lo)
        return True

    def maybe_compact(self, threads: int) -> int:
        shared = threads > 1
        if shared:
            self.guard.acquire()  # clean: near miss, the same unchanged flag guards the release
        dead = [k for k, gone in self.tombstones.items() if gone]
        for k in dead:
            self.rows.pop(k, None)
        if shared:
            self.guard.release()
        return len(dead)

    def maybe_reset(self, threads: int) -> int:
        shared = threads > 1
        if shared:
            self.guard.acquire()  # leak: the flag is cleared in the body, so the release is skipped
        count = len(self.rows)
        if count == 0:
            shared = False
        self.rows.clear()
        self.tombstones.clear()
        if shared:
            self.guard.release()
        return count


class Transaction:
    def __init__(self, store: MetaStore, keys: List[str]) -> None:
        self.store = store
        self.keys = sorted(set(keys))
        self.held: List[str] = []

    def begin(self) -> bool:
        for key in self.keys:
            if not self.store.locks.try_lock(key, 0.5):  # clean: near miss, rollback unlocks everything in held
                self.rollback()
                return False
            self.held.append(key)
        return True

    def rollback(self) -> None:
        while self.held:
            self.store.locks.unlock(self.held.pop())

    def commit(self, apply: Callable[[str], Optional[Dict[str, str]]]) -> None:
        for key in self.held:
            self.store.rows[key] = apply(key) or {}
        self.rollback()
