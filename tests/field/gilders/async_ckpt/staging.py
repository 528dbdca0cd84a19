"""Host staging areas for device-to-host copies of checkpoint shards."""
from __future__ import annotations

import threading
from typing import List, Optional


class StagingArea:
    def __init__(self, size: int):
        self.mem = bytearray(size)
        self.used = 0


class StagingPool:
    def __init__(self, size: int, count: int):
        self.size = size
        self._count = count
        self._areas: List[StagingArea] = [StagingArea(size) for _ in range(count)]
        self._lock = threading.Lock()
        self._gate = threading.Semaphore(count)

    def get(self, block: bool = True, timeout: Optional[float] = None) -> Optional[StagingArea]:
        if not self._gate.acquire(block, timeout):  # clean: near miss, the permit goes with the area and put releases it
            return None
        with self._lock:
            return self._areas.pop()

    def put(self, area: StagingArea) -> None:
        area.used = 0
        with self._lock:
            self._areas.append(area)
        self._gate.release()

    def try_get_many(self, count: int) -> List[StagingArea]:
        """All or nothing; an empty list means not enough areas."""
        got: List[StagingArea] = []
        for _ in range(count):
            area = self.get(block=False)  # leak: a short batch is dropped by the early return
            if area is None:
                return []
            got.append(area)
        return got

    def shrink(self, count: int) -> int:
        self._lock.acquire()  # leak: the early return keeps the lock held
        if count >= self._count:
            return self._count
        while len(self._areas) > count:
            self._areas.pop()
            self._count -= 1
        self._lock.release()
        return self._count


class StagedCopy:
    """One shard's bytes in a staging area."""

    def __init__(self, pool: StagingPool, name: str, payload: bytes):
        self._pool = pool
        self.name = name
        self._area = pool.get()  # clean: owned by the object, release gives it back
        self._area.mem[: len(payload)] = payload
        self._area.used = len(payload)

    def view(self) -> memoryview:
        return memoryview(self._area.mem)[: self._area.used]

    def release(self) -> None:
        if self._area is not None:
            self._pool.put(self._area)
            self._area = None

    def __enter__(self) -> "StagedCopy":
        return self

    def __exit__(self, exc_type, exc, tb) -> None:
        self.release()
