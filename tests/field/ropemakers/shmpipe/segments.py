"""Fixed-size shared memory segments with reference counts."""
from __future__ import annotations

import threading
from collections import deque
from multiprocessing import shared_memory
from typing import Deque, Dict, Optional


class SegmentRef:
    """A handle on a segment; as a context manager it gives its reference up."""

    def __init__(self, pool: "SegmentPool", name: str):
        self.pool = pool
        self.name = name

    @property
    def buf(self) -> memoryview:
        return self.pool.mapped[self.name].buf

    def dup(self) -> "SegmentRef":
        self.pool.incref(self.name)
        return SegmentRef(self.pool, self.name)

    def surrender(self) -> None:
        self.pool.decref(self.name)

    def __enter__(self) -> "SegmentRef":
        return self

    def __exit__(self, *exc) -> None:
        self.surrender()


class SegmentPool:
    def __init__(self, count: int, size: int):
        self.size = size
        self.mapped: Dict[str, shared_memory.SharedMemory] = {}
        self._refs: Dict[str, int] = {}
        self._idle: Deque[str] = deque()
        self._cv = threading.Condition()
        for _ in range(count):
            shm = shared_memory.SharedMemory(create=True, size=size)  # clean: kept in mapped, destroy() unlinks it
            self.mapped[shm.name] = shm
            self._idle.append(shm.name)

    def open_segment(self, timeout: Optional[float] = None) -> Optional[SegmentRef]:
        with self._cv:
            if not self._cv.wait_for(lambda: self._idle, timeout):
                return None
            name = self._idle.popleft()
            self._refs[name] = 1
        return SegmentRef(self, name)

    def incref(self, name: str) -> None:
        with self._cv:
            self._refs[name] += 1

    def decref(self, name: str) -> None:
        with self._cv:
            self._refs[name] -= 1
            if self._refs[name] == 0:
                self._idle.append(name)
                self._cv.notify()

    def replace_segment(self, name: str) -> bool:
        """Unlink a segment whose mapping went stale and put a new one in its place."""
        fresh = shared_memory.SharedMemory(create=True, size=self.size)  # leak: not unlinked when the old one is in use
        with self._cv:
            if self._refs.get(name, 0) > 0:
                return False
            self._idle.remove(name)
            self._idle.append(fresh.name)
            self.mapped[fresh.name] = fresh
            old = self.mapped.pop(name)
        old.close()
        old.unlink()
        return True

    def destroy(self) -> None:
        for shm in self.mapped.values():
            shm.close()
            shm.unlink()
        self.mapped.clear()
