"""Symmetric communication buffers and barrier tickets."""
from __future__ import annotations

import threading
from typing import Dict, List, Optional


class CommBuffer:
    def __init__(self, ident: int, size: int) -> None:
        self.ident = ident
        self.size = size
        self.fill = 0
        self.refs = 0

    def write(self, n: int) -> None:
        self.fill += n


class CommBufferPool:
    """acquire hands out a buffer with one reference; retain/release count."""

    def __init__(self, n: int, size: int) -> None:
        self.size = size
        self._free = [CommBuffer(i, size) for i in range(n)]
        self._cv = threading.Condition()

    def acquire(self) -> CommBuffer:
        with self._cv:
            self._cv.wait_for(lambda: self._free)
            buf = self._free.pop()
            buf.refs = 1
            buf.fill = 0
            return buf

    def retain(self, buf: CommBuffer) -> CommBuffer:
        with self._cv:
            buf.refs += 1
        return buf

    def release(self, buf: CommBuffer) -> None:
        with self._cv:
            buf.refs -= 1
            if buf.refs == 0:
                self._free.append(buf)
                self._cv.notify()


class Work:
    """Pending collective that holds its own reference to the buffer."""

    def __init__(self, pool: CommBufferPool, buf: CommBuffer) -> None:
        self._pool = pool
        self._buf: Optional[CommBuffer] = pool.retain(buf)  # clean: near miss, wait drops it

    def wait(self) -> int:
        if self._buf is None:
            return 0
        n = self._buf.fill
        self._pool.release(self._buf)
        self._buf = None
        return n
