"""Leases with fencing tokens for singleton jobs: leader election, shard moves, nightly crons."""
from __future__ import annotations

import heapq
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Callable, Optional

log = logging.getLogger("leases")


class LeaseDenied(Exception):
    """The resource is held by somebody else."""


class NoTokens(Exception):
    """All fencing tokens are in use."""


class ShardMoveFailed(Exception):
    pass


@dataclass
class Lease:
    resource: str
    owner: str
    token: int
    granted_at: float = field(default_factory=time.monotonic)
    renewals: int = 0


class LeaseTable:
    """In-process table; the replicated one has the same interface. Leases do not end by themselves."""

    def __init__(self, tokens: int = 256):
        self._lock = threading.Lock()
        self._tokens = list(range(1, tokens + 1))
        self._held: dict[str, Lease] = {}

    def grant(self, resource: str, owner: str) -> Lease:
        with self._lock:
            if not self._tokens:
                raise NoTokens(resource)
            token = heapq.heappop(self._tokens)  # leak: LeaseDenied for a held resource is raised after the token is taken
            holder = self._held.get(resource)
            if holder is not None:
                raise LeaseDenied(f"{resource} is held by {holder.owner}")
            lease = self._held[resource] = Lease(resource, owner, token)
        log.debug("%s granted to %s, token %d", resource, owner, lease.token)
        return lease

    def try_grant(self, resource: str, owner: str) -> Optional[Lease]:
        try:
            return self.grant(resource, owner)  # clean: returned to the caller
        except LeaseDenied as exc:
            log.debug("denied: %s", exc)
            return None

    def renew(self, lease: Lease) -> bool:
        with self._lock:
            lease.renewals += 1
            return self._held.get(lease.resource) is lease

    def revoke(self, lease: Lease) -> None:
        with self._lock:
            if self._held.get(lease.resource) is lease:
                del self._held[lease.resource]
                heapq.heappush(self._tokens, lease.token)


class Heartbeat(threading.Thread):
    """Renews a lease until stopped."""

    def __init__(self, table: LeaseTable, lease: Lease, period: float = 3.0, on_lost: Optional[Callable[[], None]] = None):
        super().__init__(name=f"hb-{lease.resource}", daemon=True)
        self._table, self._lease, self._period = table, lease, period
        self._on_lost = on_lost
        self._halt = threading.Event()

    def run(self) -> None:
        try:
            while not self._halt.wait(self._period):
                if not self._table.renew(self._lease):
                    log.warning("lost %s", self._lease.resource)
                    if self._on_lost is not None:
                        self._on_lost()
                    break
        finally:
            self._table.revoke(self._lease)

    def halt(self) -> None:
        self._halt.set()


class Leader:
    """Leader election. The heartbeat owns the lease from campaign() on."""

    def __init__(self, table: LeaseTable, me: str):
        self._table, self._me = table, me
        self._heartbeat: Optional[Heartbeat] = None
        self.terms = 0

    def campaign(self) -> bool:
        if self._heartbeat is not None:
            return True
        lease = self._table.try_grant("leader", self._me)  # clean: near miss, the heartbeat revokes it at the end of its run()
        if lease is None:
            return False
        self.terms += 1
        self._heartbeat = Heartbeat(self._table, lease, on_lost=self._deposed)
        self._heartbeat.start()
        return True

    def _deposed(self) -> None:
        self._heartbeat = None

    def resign(self) -> None:
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.halt()


class Lifeguard:
    """Like Leader, but the lease is to be renewed by the work loop itself."""

    def __init__(self, table: LeaseTable, resource: str, owner: str):
        self._table = table
        self._lease: Optional[Lease] = table.grant(resource, owner)  # leak: check() forgets the lease after the grace time and close() finds None
        self._checked = time.monotonic()

    def check(self) -> bool:
        now = time.monotonic()
        if self._lease is not None and now - self._checked > 30.0:
            log.error("no check of %s for %.0fs, standing down", self._lease.resource, now - self._checked)
            self._lease = None
        self._checked = now
        return self._lease is not None and self._table.renew(self._lease)

    def close(self) -> None:
        if self._lease is not None:
            self._table.revoke(self._lease)
            self._lease = None


def compact_topic(table: LeaseTable, topic: str, segments: list, me: str) -> int:
    guard = Lifeguard(table, f"compact/{topic}", me)  # clean: closed in the finally
    merged = 0
    try:
        for segment in segments:
            if not guard.check():
                break
            merged += segment.merge()
    finally:
        guard.close()
    return merged


class ShardMover:
    def __init__(self, table: LeaseTable, store, me: str):
        self._table, self._store, self._me = table, store, me
        self._frozen: dict[str, Lease] = {}

    def _copy(self, shard: str, target: str) -> int:
        copied = self._store.copy(shard, target)
        if copied != self._store.size(shard):
            raise ShardMoveFailed(f"{shard}: {copied} bytes copied")
        return copied

    def move(self, shard: str, target: str) -> int:
        lease = self._table.grant(f"shard/{shard}", self._me)  # leak: ShardMoveFailed from _copy passes by the revoke
        copied = self._copy(shard, target)
        self._store.switch(shard, target)
        self._table.revoke(lease)
        return copied

    def swap(self, a: str, b: str) -> bool:
        first, second = sorted((a, b))
        lease_one = self._table.try_grant(f"shard/{first}", self._me)  # leak: when the second is denied the first stays granted
        lease_two = self._table.try_grant(f"shard/{second}", self._me)  # clean: near miss, revoked below also when the first is missing
        if lease_one is None or lease_two is None:
            if lease_two is not None:
                self._table.revoke(lease_two)
            return False
        try:
            self._store.rename(a, b)
        finally:
            self._table.revoke(lease_two)
            self._table.revoke(lease_one)
        return True

    def freeze(self, shards: list[str]) -> list[str]:
        """Freeze as many shards as possible. Those frozen before are left alone."""
        for shard in shards:
            if shard in self._frozen:
                continue
            lease = self._table.try_grant(f"shard/{shard}", self._me)  # clean: near miss, stays in the table until thaw()
            if lease is not None:
                self._frozen[shard] = lease
        return sorted(self._frozen)

    def thaw(self) -> None:
        while self._frozen:
            _, lease = self._frozen.popitem()
            self._table.revoke(lease)


class CronRunner(threading.Thread):
    """Runs each job on one host of the fleet."""

    def __init__(self, table: LeaseTable, jobs: dict[str, Callable[[], None]], host: str):
        super().__init__(name="cron", daemon=True)
        self._table, self._jobs, self._host = table, jobs, host
        self._disabled: set[str] = set()
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(60.0):
            for name, job in self._jobs.items():
                self._run_once(name, job)

    def _run_once(self, name: str, job: Callable[[], None]) -> None:
        lease = self._table.try_grant(f"cron/{name}", self._host)  # leak: the return for a disabled job
        if lease is None:
            return
        if name in self._disabled:
            log.info("cron %s is disabled", name)
            return
        begun = time.monotonic()
        try:
            job()
        except Exception:
            log.exception("cron %s failed and is disabled", name)
            self._disabled.add(name)
        self._table.revoke(lease)
        log.info("cron %s took %.1fs", name, time.monotonic() - begun)

    def run_exclusive(self, names: list[str]) -> int:
        """Run several jobs with nobody else running any of them."""
        leases: list[Lease] = []
        try:
            for name in names:
                leases.append(self._table.grant(f"cron/{name}", self._host))  # clean: near miss, a denial further on ends in the finally
            for name in names:
                self._jobs[name]()
        except LeaseDenied:
            return 0
        finally:
            for lease in reversed(leases):
                self._table.revoke(lease)
        return len(names)
