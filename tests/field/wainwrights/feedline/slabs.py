"""Slabs: reference-counted host buffers for decoded samples."""

from __future__ import annotations

import threading
from typing import List, Optional

import numpy as np


class SlabsClosed(Exception):
    pass


class Slab:
    """A buffer with a count.  It starts at one; incref() for every further holder, decref() when one is through."""

    def __init__(self, pool: "SlabPool", nbytes: int) -> None:
        self._pool = pool
        self._count = 0
        self.mem = np.empty(nbytes, np.uint8)
        self.used = 0

    def incref(self) -> "Slab":
        with self._pool.lock:
            assert self._count > 0
            self._count += 1
        return self

    def decref(self) -> None:
        with self._pool.lock:
            self._count -= 1
            last = self._count == 0
        if last:
            self.used = 0
            self._pool._reuse(self)


class SlabPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.nbytes = nbytes
        self._free: List[Slab] = [Slab(self, nbytes) for _ in range(count)]
        self._closed = False

    def get(self, nbytes: int) -> Slab:
        with self.lock:
            while not self._free:
                if self._closed:
                    raise SlabsClosed()
                self.changed.wait(1.0)
            slab = self._free.pop()  # leak: a request over the slab size raises below with the slab popped
            if nbytes > self.nbytes:
                raise ValueError(f"{nbytes} bytes in slabs of {self.nbytes}")
            slab._count = 1
            return slab

    def get_now(self) -> Optional[Slab]:
        with self.lock:
            if not self._free or self._closed:
                return None
            slab = self._free.pop()  # clean: returned
            slab._count = 1
            return slab

    def _reuse(self, slab: Slab) -> None:
        with self.lock:
            self._free.append(slab)
            self.changed.notify()

    def close(self) -> None:
        with self.lock:
            self._closed = True
            self.changed.notify_all()
