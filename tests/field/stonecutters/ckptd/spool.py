"""Spool files are preallocated, recycled and never more than a few."""
from __future__ import annotations

import os
import threading
from typing import Dict, List, Optional


class SpoolFiles:
    def __init__(self, folder: str, count: int, size: int):
        self.folder = folder
        self.size = size
        self._unused: List[str] = [os.path.join(folder, f"spool{i:03d}") for i in range(count)]
        self._cv = threading.Condition()

    def issue(self, timeout: float = 10.0) -> Optional[str]:
        with self._cv:
            if not self._cv.wait_for(lambda: self._unused, timeout):
                return None
            return self._unused.pop()

    def recall(self, path: str) -> None:
        with self._cv:
            self._unused.append(path)
            self._cv.notify()

    def issue_blank(self) -> Optional[str]:
        path = self._issue_existing()  # clean: handed to the caller
        if path is None:
            return None
        os.truncate(path, 0)
        return path

    def _issue_existing(self) -> Optional[str]:
        path = self.issue()  # leak: a path that was removed from disk is not recalled
        if path is None or not os.path.exists(path):
            return None
        return path


class WriteSlots:
    """Write bandwidth slots, by host."""

    def __init__(self, per_host: int):
        self.per_host = per_host
        self._used: Dict[str, int] = {}
        self._mu = threading.Lock()

    def occupy(self, host: str) -> bool:
        with self._mu:
            if self._used.get(host, 0) >= self.per_host:
                return False
            self._used[host] = self._used.get(host, 0) + 1
            return True

    def free(self, host: str) -> None:
        with self._mu:
            self._used[host] -= 1
