"""Workers behind the gateway, least loaded first."""
from __future__ import annotations

import heapq
from typing import Optional


class Worker:
    def __init__(self, url: str):
        self.url = url
        self.load = 0
        self.draining = False

    def __lt__(self, other: "Worker") -> bool:
        return self.load < other.load


class WorkerHeap:
    """Exclusive use of a worker: select() takes it off the heap, settle() puts it back."""

    def __init__(self, urls: list[str]):
        self._heap = [Worker(u) for u in urls]
        heapq.heapify(self._heap)

    def select(self) -> Optional[Worker]:
        return heapq.heappop(self._heap) if self._heap else None

    def settle(self, w: Worker) -> None:
        w.load += 1
        heapq.heappush(self._heap, w)

    def select_near(self, zone: str) -> Optional[Worker]:
        passed: list[Worker] = []
        found = None
        while found is None:
            w = self.select()  # clean: near miss, workers passed over are pushed back below
            if w is None:
                break
            if zone in w.url:
                found = w
            else:
                passed.append(w)
        for w in passed:
            heapq.heappush(self._heap, w)
        return found

    def select_fresh(self) -> Optional[Worker]:
        w = self.select()  # leak: an overloaded worker is rebound to the next without settle()
        while w is not None and w.load > 100:
            w = self.select()  # leak: rebound again while workers are overloaded
        return w
