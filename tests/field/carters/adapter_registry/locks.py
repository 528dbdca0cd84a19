from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Iterator, Optional


class RWLock:
    """Many readers or one writer. Readers of a reloading adapter wait."""

    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._readers = 0
        self._writer = False

    def lock_shared(self, timeout: Optional[float] = None) -> bool:
        with self._cond:
            if not self._cond.wait_for(lambda: not self._writer, timeout):
                return False
            self._readers += 1
            return True

    def unlock_shared(self) -> None:
        with self._cond:
            self._readers -= 1
            self._cond.notify_all()

    def lock_exclusive(self, timeout: Optional[float] = None) -> bool:
        with self._cond:
            if not self._cond.wait_for(lambda: not self._writer and self._readers == 0, timeout):
                return False
            self._writer = True
            return True

    def unlock_exclusive(self) -> None:
        with self._cond:
            self._writer = False
            self._cond.notify_all()

    @contextmanager
    def shared(self) -> Iterator[None]:
        self.lock_shared()  # clean: finally unlocks
        try:
            yield
        finally:
            self.unlock_shared()

    @property
    def idle(self) -> bool:
        return not self._writer and self._readers == 0


class StripedLocks:
    def __init__(self, stripes: int) -> None:
        self._stripes = [threading.Lock() for _ in range(stripes)]

    def of(self, name: str) -> threading.Lock:
        return self._stripes[sum(name.encode()) % len(self._stripes)]
