"""Per-key locks and semaphores around a disk tier."""
from __future__ import annotations

import os
import threading
from dataclasses import dataclass


class KeyLocks:
    """Locks by key. A holder calls lock_key() and later unlock_key()."""

    def __init__(self):
        self._mu = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}

    def _lock_for(self, key: str) -> threading.Lock:
        with self._mu:
            return self._locks.setdefault(key, threading.Lock())

    def lock_key(self, key: str) -> None:
        self._lock_for(key).acquire()  # clean: near miss, held for the caller until unlock_key()

    def try_lock_key(self, key: str) -> bool:
        return self._lock_for(key).acquire(blocking=False)  # clean: the outcome is the caller's

    def unlock_key(self, key: str) -> None:
        self._lock_for(key).release()


@dataclass
class DiskEntry:
    path: str
    size: int
    dirty: bool = False


class DiskTier:
    def __init__(self, root: str, max_io: int):
        self.root = root
        self.locks = KeyLocks()
        self.io = threading.BoundedSemaphore(max_io)
        self.index: dict[str, DiskEntry] = {}
        self.evicting: set[str] = set()
        self._state = threading.Lock()

    def read(self, key: str) -> bytes | None:
        self.locks.lock_key(key)  # leak: an unknown key returns with the key locked
        entry = self.index.get(key)
        if entry is None:
            return None
        with open(entry.path, "rb") as f:
            data = f.read()
        self.locks.unlock_key(key)
        return data

    def write(self, key: str, data: bytes) -> bool:
        self.locks.lock_key(key)  # clean: near miss, all returns lie inside the try whose finally unlocks
        try:
            if key in self.index and not self.index[key].dirty:
                return False
            path = os.path.join(self.root, key)
            with open(path, "wb") as f:
                f.write(data)
            self.index[key] = DiskEntry(path, len(data))
            return True
        finally:
            self.locks.unlock_key(key)

    def mark_dirty(self, keys: list[str]) -> int:
        n = 0
        for key in keys:
            if not self.locks.try_lock_key(key):  # clean: unlocked at the end of the round
                continue
            entry = self.index.get(key)
            if entry is not None:
                entry.dirty = True
                n += 1
            self.locks.unlock_key(key)
        return n

    def flush(self, keys: list[str]) -> int:
        n = 0
        for key in keys:
            if not self.locks.try_lock_key(key):  # leak: clean entries take the continue with the key locked
                continue
            entry = self.index.get(key)
            if entry is None or not entry.dirty:
                continue
            entry.dirty = False
            n += 1
            self.locks.unlock_key(key)
        return n

    def begin_evict(self, key: str) -> bool:
        if not self.locks.try_lock_key(key):  # clean: near miss, the lock stays until end_evict()
            return False
        if key not in self.index:
            self.locks.unlock_key(key)
            return False
        self.evicting.add(key)
        return True

    def end_evict(self, key: str) -> None:
        if key not in self.evicting:
            return
        self.evicting.discard(key)
        self.index.pop(key, None)
        self.locks.unlock_key(key)

    def rename(self, a: str, b: str) -> bool:
        first, second = sorted((a, b))
        self.locks.lock_key(first)  # clean: near miss, unlocked in both outcomes
        if not self.locks.try_lock_key(second):  # clean: unlocked with the first one
            self.locks.unlock_key(first)
            return False
        if a in self.index:
            self.index[b] = self.index.pop(a)
        self.locks.unlock_key(second)
        self.locks.unlock_key(first)
        return True

    def link(self, src: str, dst: str) -> bool:
        self.locks.lock_key(src)  # leak: when dst is busy the method returns with src locked
        if not self.locks.try_lock_key(dst):  # clean: unlocked at the end
            return False
        if src in self.index:
            self.index[dst] = self.index[src]
        self.locks.unlock_key(dst)
        self.locks.unlock_key(src)
        return True

    def scan(self) -> list[str]:
        self.io.acquire()  # clean: released in the finally
        try:
            return sorted(os.listdir(self.root))
        finally:
            self.io.release()

    def stat(self, key: str) -> int:
        if not self.io.acquire(timeout=1.0):  # leak: the missing entry's return skips the release
            return -1
        entry = self.index.get(key)
        if entry is None:
            return 0
        size = os.path.getsize(entry.path)
        self.io.release()
        return size

    def total(self, wait: bool) -> int:
        got = self._state.acquire(blocking=wait)  # clean: near miss, released exactly when it was obtained
        size = sum(e.size for e in list(self.index.values()))
        if got:
            self._state.release()
        return size

    def drop_all(self) -> bool:
        self._state.acquire()  # leak: the branch with evictions in flight returns without the release
        if self.evicting:
            return False
        self.index.clear()
        self._state.release()
        return True
