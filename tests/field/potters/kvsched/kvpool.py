"""Leases of KV blocks. A Lease is all the blocks of one request."""
from __future__ import annotations

import threading
from typing import List, Optional


class Lease:
    def __init__(self, pool: "KVPool", blocks: List[int]) -> None:
        self._pool = pool
        self.blocks = blocks
        self.live = True

    def __len__(self) -> int:
        return len(self.blocks)

    def release(self) -> None:
        if self.live:
            self.live = False
            self._pool._take_back(self.blocks)


class KVPool:
    def __init__(self, n: int, reserve: int = 0) -> None:
        self._free = list(range(n))
        self._mu = threading.RLock()
        self.reserve = reserve

    def lease(self, n: int) -> Optional[Lease]:
        self._mu.acquire()  # leak: a refusal returns with the mutex held
        if len(self._free) - n < self.reserve:
            return None
        taken = [self._free.pop() for _ in range(n)]
        self._mu.release()
        return Lease(self, taken)

    def lease_urgent(self, n: int) -> Optional[Lease]:
        """Ignores the reserve."""
        with self._mu:
            if len(self._free) < n:
                return None
            return Lease(self, [self._free.pop() for _ in range(n)])

    def _take_back(self, blocks: List[int]) -> None:
        with self._mu:
            self._free.extend(blocks)

    @property
    def free(self) -> int:
        return len(self._free)
