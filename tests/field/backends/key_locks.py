"""Named locks for cache keys, and the loaders that fill the cache under them."""
from __future__ import annotations

import threading
import time
from typing import Any, Callable


class KeyLocks:
    """Locks by key; an entry lives while somebody holds or awaits it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._entries: dict[str, list] = {}

    def lock(self, key: str, timeout: float = -1.0) -> bool:
        with self._guard:
            entry = self._entries.setdefault(key, [threading.Lock(), 0])
            entry[1] += 1  # clean: near miss, the user count is taken back when the lock times out
        if entry[0].acquire(timeout=timeout):  # clean: held for the caller until unlock
            return True
        self._forget(key, entry)
        return False

    def unlock(self, key: str) -> None:
        entry = self._entries[key]
        entry[0].release()
        self._forget(key, entry)

    def _forget(self, key: str, entry: list) -> None:
        with self._guard:
            entry[1] -= 1
            if entry[1] == 0:
                del self._entries[key]


class Loader:
    def __init__(self, locks: KeyLocks, fetch: Callable[[str], Any]) -> None:
        self._locks = locks
        self._fetch = fetch
        self._values: dict[str, tuple[float, Any]] = {}
        self.ttl = 30.0

    def _fresh(self, key: str) -> Any:
        entry = self._values.get(key)
        if entry is None or time.monotonic() - entry[0] > self.ttl:
            return None
        return entry[1]

    def get(self, key: str) -> Any:
        value = self._fresh(key)
        if value is not None:
            return value
        self._locks.lock(key)  # leak: the second look finds a value and returns with the key locked
        value = self._fresh(key)
        if value is not None:
            return value
        value = self._fetch(key)
        self._values[key] = (time.monotonic(), value)
        self._locks.unlock(key)
        return value

    def get_guarded(self, key: str) -> Any:
        self._locks.lock(key)  # clean: near miss, both returns are inside the try
        try:
            value = self._fresh(key)
            if value is not None:
                return value
            value = self._fetch(key)
            self._values[key] = (time.monotonic(), value)
            return value
        finally:
            self._locks.unlock(key)

    def refresh_many(self, keys: list[str]) -> int:
        done = 0
        for key in keys:
            if not self._locks.lock(key, timeout=0.01):  # leak: a fetch that gives None continues without unlock
                continue
            value = self._fetch(key)
            if value is None:
                continue
            self._values[key] = (time.monotonic(), value)
            self._locks.unlock(key)
            done += 1
        return done

    def invalidate(self, key: str) -> bool:
        if not self._locks.lock(key, timeout=1.0):  # clean: near miss, False means not held, the other two paths unlock
            return False
        if key not in self._values:
            self._locks.unlock(key)
            return False
        del self._values[key]
        self._locks.unlock(key)
        return True

    def rename(self, old: str, new: str) -> bool:
        first, second = sorted((old, new))
        self._locks.lock(first)  # leak: stays locked when the second key cannot be locked
        if not self._locks.lock(second, timeout=0.5):  # clean: unlocked at the end
            return False
        if old in self._values:
            self._values[new] = self._values.pop(old)
        self._locks.unlock(second)
        self._locks.unlock(first)
        return True

    def lock_all(self, keys: list[str]) -> list[str] | None:
        held: list[str] = []
        for key in sorted(keys):
            if not self._locks.lock(key, timeout=0.1):  # clean: near miss, a refusal unwinds the list, else the caller has it
                for taken in reversed(held):
                    self._locks.unlock(taken)
                return None
            held.append(key)
        return held

    def replace_all(self, values: dict[str, Any]) -> bool:
        held = self.lock_all(list(values))  # clean: unlocked in the finally
        if held is None:
            return False
        try:
            for key, value in values.items():
                self._values[key] = (time.monotonic(), value)
        finally:
            for key in held:
                self._locks.unlock(key)
        return True

    def touch_all(self, keys: list[str]) -> int:
        held = self.lock_all(keys)  # leak: keys without a value are passed over together with their unlock
        if held is None:
            return 0
        touched = 0
        for key in held:
            entry = self._values.get(key)
            if entry is not None:
                self._values[key] = (time.monotonic(), entry[1])
                touched += 1
                self._locks.unlock(key)
        return touched


class Janitor:
    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._turn = threading.Semaphore(1)

    def sweep(self, now: float) -> int:
        if not self._turn.acquire(blocking=False):  # leak: nothing cached returns with the semaphore taken
            return 0
        values = self._loader._values
        if not values:
            return 0
        stale = [k for k, (at, _) in values.items() if now - at > self._loader.ttl]
        removed = sum(1 for key in stale if self._loader.invalidate(key))
        self._turn.release()
        return removed
