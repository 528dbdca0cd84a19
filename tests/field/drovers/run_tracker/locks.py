"""Advisory run locks and a named-lock table."""
import os
import threading
from typing import Dict, Optional


class LockTable:
    """One counted lock per run; entries vanish when nobody uses them."""

    def __init__(self):
        self._mu = threading.Lock()
        self._locks: Dict[str, threading.Lock] = {}
        self._users: Dict[str, int] = {}

    def enter(self, run: str) -> threading.Lock:
        with self._mu:
            lock = self._locks.setdefault(run, threading.Lock())
            self._users[run] = self._users.get(run, 0) + 1
        lock.acquire()  # clean: leave releases it
        return lock

    def enter_nowait(self, run: str) -> Optional[threading.Lock]:
        with self._mu:
            lock = self._locks.setdefault(run, threading.Lock())
            if not lock.acquire(blocking=False):  # clean: near miss, returned when taken, None when not
                return None
            self._users[run] = self._users.get(run, 0) + 1
        return lock

    def leave(self, run: str) -> None:
        with self._mu:
            self._locks[run].release()
            self._users[run] -= 1
            if self._users[run] == 0:
                del self._locks[run], self._users[run]


class PidFile:
    """Marks a run directory as being written."""

    def __init__(self, directory: str):
        self.path = os.path.join(directory, "writer.pid")
        self._fh = None

    def __enter__(self) -> "PidFile":
        self._fh = open(self.path, "a+")  # leak: __exit__ returns before the close if the marker has already been removed
        self._fh.write(f"{os.getpid()}\n")
        self._fh.flush()
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        if not os.path.exists(self.path):
            return False
        self._fh.close()
        os.unlink(self.path)
        return False
