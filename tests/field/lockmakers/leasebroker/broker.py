from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

from .store import LeaseStore


class NoCapacity(Exception):
    pass


@dataclass
class Lease:
    token: int
    row: tuple[str, int]
    owner: str
    expires: float

    @property
    def host(self) -> str:
        return self.row[0]


class Broker:
    """Wraps a LeaseStore: every row that leaves has a token and an owner."""

    def __init__(self, store: LeaseStore, ttl: float = 60.0):
        self.store = store
        self.ttl = ttl
        self.expiry: dict[int, tuple[str, float]] = {}
        self.banned: set[str] = set()
        self._tokens = itertools.count(1)

    def _issue(self, row: tuple[str, int], owner: str) -> Lease:
        lease = Lease(next(self._tokens), row, owner, time.monotonic() + self.ttl)
        self.expiry[lease.token] = (owner, lease.expires)
        return lease

    def obtain(self, owner: str) -> Lease:
        row = self.store.pick()  # clean: issued as a lease that the caller relinquishes
        if row is None:
            raise NoCapacity(owner)
        return self._issue(row, owner)

    def obtain_on(self, owner: str, host: str) -> Lease | None:
        row = self.store.pick_on(host)  # leak: a banned owner gets None after the row left the store
        if row is None or owner in self.banned:
            return None
        return self._issue(row, owner)

    def obtain_near(self, owner: str, hosts: list[str]) -> Lease:
        row = None
        for host in hosts:
            row = self.store.pick_on(host)  # clean: near miss, the loop ends on the first row, so only None is rebound
            if row is not None:
                break
        else:
            raise NoCapacity(owner)
        return self._issue(row, owner)

    def obtain_group(self, owner: str, n: int) -> list[Lease]:
        rows: list[tuple[str, int]] = []
        while len(rows) < n:
            row = self.store.pick()  # clean: near miss, a short group is shelved again before NoCapacity, else issued
            if row is None:
                for r in rows:
                    self.store.shelve(r)
                raise NoCapacity(owner)
            rows.append(row)
        return [self._issue(r, owner) for r in rows]

    def relinquish(self, lease: Lease) -> bool:
        if self.expiry.pop(lease.token, None) is None:
            return False
        self.store.shelve(lease.row)
        return True

    def renew(self, lease: Lease) -> None:
        lease.expires = time.monotonic() + self.ttl
        self.expiry[lease.token] = (lease.owner, lease.expires)
