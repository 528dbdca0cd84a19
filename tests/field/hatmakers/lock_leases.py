"""Distributed-style lock leases kept in one table, with fencing tokens; used by the deploy coordinator."""
from __future__ import annotations

import itertools
import logging
import threading
import time
from dataclasses import dataclass
from typing import Callable, Optional

log = logging.getLogger("deploy.locks")


@dataclass(frozen=True)
class LockLease:
    key: str
    owner: str
    fence: int


class LeaseTable:
    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._held: dict[str, LockLease] = {}
        self._fences = itertools.count(1)

    def grab(self, key: str, owner: str) -> Optional[LockLease]:
        with self._mutex:
            if key in self._held:
                return None
            lease = LockLease(key, owner, next(self._fences))
            self._held[key] = lease
            return lease

    def surrender(self, lease: LockLease) -> None:
        with self._mutex:
            if self._held.get(lease.key) == lease:
                del self._held[lease.key]

    def grab_wait(self, key: str, owner: str, patience: float) -> Optional[LockLease]:
        end = time.monotonic() + patience
        while time.monotonic() < end:
            lease = self.grab(key, owner)  # clean: handed to the caller as soon as there is one
            if lease is not None:
                return lease
            time.sleep(0.05)
        return None


class KeyGuard:
    """with KeyGuard(table, key, owner) as lease: ..."""

    def __init__(self, table: LeaseTable, key: str, owner: str, patience: float = 1.0) -> None:
        self.table = table
        self.key = key
        self.owner = owner
        self.patience = patience
        self.lease: Optional[LockLease] = None

    def __enter__(self) -> Optional[LockLease]:
        self.lease = self.table.grab_wait(self.key, self.owner, self.patience)  # clean: __exit__ surrenders it
        return self.lease

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.lease is not None:
            self.table.surrender(self.lease)
            self.lease = None
        return False


class AuditedGuard:
    """Like KeyGuard, writes how long the section took."""

    def __init__(self, table: LeaseTable, key: str, owner: str, audit: Callable[[str], None]) -> None:
        self.table = table
        self.key = key
        self.owner = owner
        self.audit = audit
        self.entered = 0.0
        self.lease: Optional[LockLease] = None

    def __enter__(self) -> "AuditedGuard":
        self.entered = time.monotonic()
        self.lease = self.table.grab(self.key, self.owner)  # leak: __exit__ returns early for a short section
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        took = time.monotonic() - self.entered
        if took < 0.5:
            return False
        self.audit(f"{self.owner} held {self.key} for {took:.1f}s")
        if self.lease is not None:
            self.table.surrender(self.lease)
        return False


class Coordinator:
    def __init__(self, table: LeaseTable, name: str) -> None:
        self.table = table
        self.name = name
        self.versions: dict[str, str] = {}
        self.leader: Optional[LockLease] = None
        self._rollouts: dict[str, LockLease] = {}

    # leadership --------------------------------------------------------------------------------------------
    def campaign(self) -> bool:
        if self.leader is not None:
            return True
        self.leader = self.table.grab("leader", self.name)  # clean: near miss, resign() gives it back
        return self.leader is not None

    def resign(self) -> None:
        if self.leader is None:
            return
        self.table.surrender(self.leader)
        self.leader = None

    # one-shot work -----------------------------------------------------------------------------------------
    def deploy(self, service: str, version: str) -> bool:
        lease = self.table.grab_wait(f"svc/{service}", self.name, 2.0)  # leak: same version returns early
        if lease is None:
            return False
        if self.versions.get(service) == version:
            log.info("%s is at %s already", service, version)
            return True
        self.versions[service] = version
        log.info("%s -> %s (fence %d)", service, version, lease.fence)
        self.table.surrender(lease)
        return True

    def restart(self, service: str) -> bool:
        with KeyGuard(self.table, f"svc/{service}", self.name) as lease:  # clean: guard surrenders on every exit
            if lease is None:
                return False
            if service not in self.versions:
                return False
            log.info("restart %s under fence %d", service, lease.fence)
            return True

    def swap(self, left: str, right: str) -> bool:
        first, second = sorted((left, right))
        a = self.table.grab(f"svc/{first}", self.name)  # leak: stays held where the second lock is taken
        if a is None:
            return False
        b = self.table.grab(f"svc/{second}", self.name)  # clean: None-checked and surrendered
        if b is None:
            log.info("swap of %s and %s postponed", left, right)
            return False
        self.versions[left], self.versions[right] = self.versions[right], self.versions[left]
        self.table.surrender(b)
        self.table.surrender(a)
        return True

    def freeze_all(self, services: list[str]) -> Optional[list[LockLease]]:
        taken: list[LockLease] = []
        for service in sorted(services):
            lease = self.table.grab(f"svc/{service}", self.name)  # clean: near miss, rolled back or handed on as list
            if lease is None:
                for held in reversed(taken):
                    self.table.surrender(held)
                return None
            taken.append(lease)
        return taken

    def thaw(self, leases: list[LockLease]) -> None:
        for lease in leases:
            self.table.surrender(lease)

    def migrate(self, services: list[str], version: str) -> int:
        leases = self.freeze_all(services)  # clean: thawed after the loop
        if leases is None:
            return 0
        for service in services:
            self.versions[service] = version
        self.thaw(leases)
        return len(services)

    def migrate_first(self, services: list[str], version: str) -> int:
        leases = self.freeze_all(services)  # leak: only the first lease of the list is surrendered
        if not leases:
            return 0
        moved = 0
        for service in services:
            if self.versions.get(service) != version:
                self.versions[service] = version
                moved += 1
        self.table.surrender(leases[0])
        return moved

    # rollouts ----------------------------------------------------------------------------------------------
    def begin_rollout(self, service: str) -> bool:
        lease = self.table.grab(f"rollout/{service}", self.name)  # leak: a failed rollout is deleted with its lease
        if lease is None:
            return False
        self._rollouts[service] = lease
        return True

    def finish_rollout(self, service: str, healthy: bool) -> None:
        lease = self._rollouts.get(service)
        if lease is None:
            return
        if healthy:
            self.table.surrender(lease)
        else:
            log.warning("rollout of %s is unhealthy, fence %d", service, lease.fence)
        del self._rollouts[service]

    def schedule(self, service: str, delay: float, work: Callable[[], None]) -> bool:
        lease = self.table.grab(f"timer/{service}", self.name)  # clean: near miss, the timer's function surrenders it
        if lease is None:
            return False

        def fire() -> None:
            try:
                work()
            finally:
                self.table.surrender(lease)

        threading.Timer(delay, fire).start()
        return True
