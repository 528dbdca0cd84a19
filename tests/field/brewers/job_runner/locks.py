"""Per-key locks and a reader/writer gate."""
from __future__ import annotations

import contextlib
import threading
from typing import Dict, Iterator, Sequence


class KeyLocks:
    def __init__(self) -> None:
        self._locks: Dict[str, threading.Lock] = {}
        self._table = threading.Lock()

    def _of(self, key: str) -> threading.Lock:
        with self._table:
            return self._locks.setdefault(key, threading.Lock())

    def lock(self, key: str) -> None:
        self._of(key).acquire()  # clean: handed to the caller, unlock releases

    def try_lock(self, key: str) -> bool:
        return self._of(key).acquire(blocking=False)  # clean: handed to the caller by the True

    def unlock(self, key: str) -> None:
        self._of(key).release()

    def lock_all(self, keys: Sequence[str]) -> bool:
        """Without waiting; the caller unlocks each key when True."""
        for key in sorted(keys):
            if not self.try_lock(key):  # leak: a busy key returns False, the keys locked before stay locked
                return False
        return True

    @contextlib.contextmanager
    def holding(self, key: str) -> Iterator[None]:
        self.lock(key)  # clean: unlocked in finally
        try:
            yield
        finally:
            self.unlock(key)


class RwGate:
    """Many readers or one writer."""

    def __init__(self) -> None:
        self._cv = threading.Condition(threading.Lock())
        self._readers = 0
        self._writing = False

    def enter_read(self) -> None:
        self._cv.acquire()  # clean: released in finally
        try:
            while self._writing:
                self._cv.wait()
            self._readers += 1
        finally:
            self._cv.release()

    def leave_read(self) -> None:
        with self._cv:
            self._readers -= 1
            self._cv.notify_all()

    def enter_write(self, timeout: float) -> bool:
        self._cv.acquire()  # leak: timed out, returns False with the condition's lock held
        while self._writing or self._readers:
            if not self._cv.wait(timeout):
                return False
        self._writing = True
        self._cv.release()
        return True

    def leave_write(self) -> None:
        with self._cv:
            self._writing = False
            self._cv.notify_all()
