from __future__ import annotations

import itertools
import threading
from typing import NamedTuple, Optional


class Lease(NamedTuple):
    lease_id: int
    key: str


class LeaseBook:
    """Read leases keep an object in the store from being evicted."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._readers: dict[str, set[int]] = {}
        self._ids = itertools.count()
        self._mu = threading.RLock()

    def store(self, key: str, value: bytes) -> None:
        with self._mu:
            self._objects[key] = value

    def grant(self, key: str) -> Optional[Lease]:
        with self._mu:
            if key not in self._objects:
                return None
            lease = Lease(next(self._ids), key)
            self._readers.setdefault(key, set()).add(lease.lease_id)
            return lease

    def revoke(self, lease: Lease) -> None:
        with self._mu:
            self._readers[lease.key].discard(lease.lease_id)

    def read(self, lease: Lease) -> bytes:
        return self._objects[lease.key]

    def evict(self) -> int:
        with self._mu:
            gone = [k for k in self._objects if not self._readers.get(k)]
            for k in gone:
                del self._objects[k]
            return len(gone)

    def grant_prefix(self, keys: list[str]) -> list[Lease]:
        """Longest run of present keys, one lease each."""
        run: list[Lease] = []
        for key in keys:
            lease = self.grant(key)  # clean: the run goes to the caller
            if lease is None:
                break
            run.append(lease)
        return run
