"""In-memory object store: sealed objects, pin counts and eviction of what is not pinned."""
from __future__ import annotations

import threading
from typing import Dict, List, Optional


class ObjectStore:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._data: Dict[str, bytes] = {}
        self._pins: Dict[str, int] = {}
        self._guard = threading.Lock()

    def put(self, oid: str, data: bytes) -> None:
        with self._guard:
            self._data[oid] = data
            self._pins.setdefault(oid, 0)

    def pin(self, oid: str) -> Optional[memoryview]:
        with self._guard:
            data = self._data.get(oid)
            if data is None:
                return None
            self._pins[oid] += 1
            return memoryview(data)

    def unpin(self, oid: str) -> None:
        with self._guard:
            self._pins[oid] -= 1

    def pinned(self) -> int:
        return sum(self._pins.values())

    def pin_many(self, oids: List[str]) -> Optional[List[memoryview]]:
        views: List[memoryview] = []
        for oid in oids:
            view = self.pin(oid)  # clean: near miss, those before it are unpinned when one is missing
            if view is None:
                for done in oids[: len(views)]:
                    self.unpin(done)
                return None
            views.append(view)
        return views

    def pin_prefix(self, oids: List[str], budget: int) -> List[memoryview]:
        views: List[memoryview] = []
        for oid in oids:
            view = self.pin(oid)  # leak: the view that breaks the budget stays pinned and is not returned
            if view is None:
                break
            if len(view) > budget:
                break
            budget -= len(view)
            views.append(view)
        return views

    def evict(self) -> int:
        self._guard.acquire()  # leak: returns with the guard held when the store is below its capacity
        used = sum(len(d) for d in self._data.values())
        if used <= self.capacity:
            return 0
        victims = [oid for oid, n in self._pins.items() if n == 0]
        for oid in victims:
            del self._data[oid]
            del self._pins[oid]
        self._guard.release()
        return len(victims)
