"""Who may serve or mutate which embedding shard."""
from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional, Sequence


@dataclass(eq=False)
class ShardLease:
    shard: int
    holder: str
    epoch: int


class LeaseBoard:
    def __init__(self, shards: int) -> None:
        self._lock = threading.Lock()
        self._held: Dict[int, ShardLease] = {}
        self._epochs = [0] * shards

    def lease(self, shard: int, holder: str) -> Optional[ShardLease]:
        with self._lock:
            if shard in self._held:
                return None
            self._epochs[shard] += 1
            granted = ShardLease(shard, holder, self._epochs[shard])
            self._held[shard] = granted
            return granted

    def surrender(self, lease: ShardLease) -> None:
        with self._lock:
            current = self._held.get(lease.shard)
            if current is lease:
                del self._held[lease.shard]

    def outstanding(self) -> int:
        with self._lock:
            return len(self._held)

    @contextmanager
    def held(self, shard: int, holder: str) -> Iterator[Optional[ShardLease]]:
        lease = self.lease(shard, holder)  # clean: near miss, the guard in finally matches the None case
        try:
            yield lease
        finally:
            if lease is not None:
                self.surrender(lease)

    def lease_all(self, shards: Sequence[int], holder: str) -> Optional[List[ShardLease]]:
        """All of them or none."""
        got: List[ShardLease] = []
        for shard in shards:
            lease = self.lease(shard, holder)  # clean: near miss, rolled back as a whole or returned as a whole
            if lease is None:
                for earlier in got:
                    self.surrender(earlier)
                return None
            got.append(lease)
        return got
