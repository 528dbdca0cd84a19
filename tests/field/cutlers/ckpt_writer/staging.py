"""Staging areas for asynchronous checkpoints."""
from __future__ import annotations

import threading
from typing import Optional


class StagingArea:
    def __init__(self, idx: int, size: int) -> None:
        self.idx = idx
        self.mem = bytearray(size)
        self.length = 0

    def load(self, payload: bytes) -> None:
        self.mem[:len(payload)] = payload
        self.length = len(payload)


class StagingManager:
    def __init__(self, n: int, size: int) -> None:
        self.size = size
        self._mutex = threading.Lock()
        self._free = [StagingArea(i, size) for i in range(n)]

    def obtain(self) -> Optional[StagingArea]:
        if not self._mutex.acquire(timeout=1.0):  # leak: an empty free list returns with the mutex held
            return None
        if not self._free:
            return None
        area = self._free.pop()
        self._mutex.release()
        return area

    def relinquish(self, area: StagingArea) -> None:
        self._mutex.acquire()  # clean: released in finally
        try:
            area.length = 0
            self._free.append(area)
        finally:
            self._mutex.release()

    def idle(self) -> int:
        self._mutex.acquire()  # clean: released before the return
        n = len(self._free)
        self._mutex.release()
        return n
