from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field


@dataclass
class Lease:
    id: int
    host: str
    slots: int
    until: float
    shared_with: set[str] = field(default_factory=set)


class HostLeases:
    """Counts free slots per host.  A lease is a piece of paper that says how many."""

    def __init__(self, hosts: dict[str, int], ttl: float = 600.0) -> None:
        self._left = dict(hosts)
        self._ids = itertools.count(1)
        self._mu = threading.RLock()
        self.ttl = ttl
        self.cordoned: set[str] = set()

    def issue(self, host: str, slots: int) -> Lease | None:
        with self._mu:
            if self._left.get(host, 0) < slots:
                return None
            self._left[host] -= slots
            return Lease(next(self._ids), host, slots, time.monotonic() + self.ttl)

    def surrender(self, lease: Lease) -> None:
        with self._mu:
            self._left[lease.host] += lease.slots
            lease.slots = 0

    def issue_anywhere(self, slots: int) -> Lease | None:
        for host in sorted(self._left, key=self._left.get):
            lease = self.issue(host, slots)  # leak: a lease on a cordoned host is dropped for the next host
            if lease is None:
                continue
            if host in self.cordoned:
                continue
            return lease
        return None

    def issue_gang(self, want: dict[str, int]) -> list[Lease] | None:
        got: list[Lease] = []
        for host, slots in want.items():
            lease = self.issue(host, slots)  # clean: near miss, the partial gang is surrendered before None
            if lease is None:
                break
            got.append(lease)
        else:
            return got
        for lease in got:
            self.surrender(lease)
        return None

    def freeze(self, timeout: float) -> bool:
        """Stops issuing; pairs with thaw()."""
        return self._mu.acquire(timeout=timeout)  # clean: held for the caller, who calls thaw()

    def thaw(self) -> None:
        self._mu.release()
