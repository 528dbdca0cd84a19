"""Host staging memory for checkpoints that are written in the background."""
from __future__ import annotations

import heapq
import threading
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple


@dataclass
class StagingLease:
    token: int
    capacity: int
    memory: memoryview
    length: int = 0

    def store(self, data: bytes) -> None:
        self.memory[: len(data)] = data
        self.length = len(data)

    def bytes(self) -> bytes:
        return bytes(self.memory[: self.length])


class StagingPool:
    """Best fit over a heap of free regions; leases are known by token."""

    def __init__(self, sizes: List[int]) -> None:
        self._heap: List[Tuple[int, int]] = []
        self._regions: Dict[int, bytearray] = {}
        self._leased: Dict[int, StagingLease] = {}
        self._cond = threading.Condition()
        for token, size in enumerate(sizes):
            self._regions[token] = bytearray(size)
            heapq.heappush(self._heap, (size, token))

    def lease(self, nbytes: int) -> Optional[StagingLease]:
        with self._cond:
            skipped: List[Tuple[int, int]] = []
            found: Optional[StagingLease] = None
            while self._heap:
                size, token = heapq.heappop(self._heap)  # clean: near miss, regions that are too small are pushed back below
                if size >= nbytes:
                    found = StagingLease(token, size, memoryview(self._regions[token]))
                    self._leased[token] = found
                    break
                skipped.append((size, token))
            for item in skipped:
                heapq.heappush(self._heap, item)
            return found

    def lease_wait(self, nbytes: int, timeout: float) -> Optional[StagingLease]:
        with self._cond:
            self._cond.wait_for(lambda: any(s >= nbytes for s, _ in self._heap), timeout)
        return self.lease(nbytes)  # clean: returned to the caller, None included

    def unlease(self, lease: StagingLease) -> None:
        with self._cond:
            del self._leased[lease.token]
            lease.length = 0
            heapq.heappush(self._heap, (lease.capacity, lease.token))
            self._cond.notify_all()

    def resize(self, lease: StagingLease, nbytes: int) -> Optional[StagingLease]:
        """Exchange a lease for a larger one; the old one stays valid on failure."""
        bigger = self.lease(nbytes)  # clean: near miss, the old lease goes back here and the new one is returned
        if bigger is None:
            return None
        bigger.store(lease.bytes())
        self.unlease(lease)
        return bigger

    def leased_count(self) -> int:
        with self._cond:
            return len(self._leased)
