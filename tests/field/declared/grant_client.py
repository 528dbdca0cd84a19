"""Client side of the lease hub: leadership, shards and renewals."""
from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional

from leasehub import HubClient, HubUnavailable

log = logging.getLogger(__name__)


@dataclass
class ShardClaim:
    shard: int
    lease: Any = None
    owned: bool = True
    renewals: int = 0


@dataclass
class Assignment:
    worker: str
    claims: List[ShardClaim] = field(default_factory=list)


class Leadership:
    def __init__(self, hub: HubClient, group: str, ttl: float) -> None:
        self._hub = hub
        self._group = group
        self._ttl = ttl
        self._lease: Optional[Any] = None
        self._standby: Optional[Any] = None

    @property
    def leading(self) -> bool:
        return self._lease is not None and not self._lease.expired

    def campaign(self) -> bool:
        lease = self._hub.grant_lease(self._group, self._ttl)  # clean: near miss, kept as leader or standby, surrendered when both are taken
        if self._lease is None:
            self._lease = lease
        elif self._standby is None:
            self._standby = lease
        else:
            self._hub.surrender(lease=lease)
        return self.leading

    def refresh(self) -> None:
        if self.leading:
            return
        self._lease = self._hub.grant_lease(self._group, self._ttl)  # leak: an expired lease that still is registered is overwritten

    def rotate(self) -> None:
        fresh = self._hub.grant_lease(self._group, self._ttl)  # clean: near miss, swapped with the old one, which is revoked
        self._lease, fresh = fresh, self._lease
        if fresh is not None:
            fresh.revoke()

    def resign(self) -> None:
        for lease in (self._lease, self._standby):
            if lease is not None:
                lease.revoke()
        self._lease = self._standby = None


class ShardTable:
    def __init__(self, hub: HubClient, ttl: float) -> None:
        self._hub = hub
        self._ttl = ttl
        self._claims: Dict[int, ShardClaim] = {}
        self._waiting: Dict[int, Any] = {}

    def claim(self, shard: int, lease: Any = None) -> ShardClaim:
        """Claim a shard under the given lease, or under one of our own."""
        held = self._claims.get(shard)
        if held is not None:
            return held
        owned = lease is None
        if owned:
            lease = self._hub.grant_lease(f"shard/{shard}", self._ttl)  # clean: near miss, the owned flag makes drop revoke it
        claim = ShardClaim(shard, lease, owned)
        self._claims[shard] = claim
        return claim

    def drop(self, shard: int) -> None:
        claim = self._claims.pop(shard, None)
        if claim is None:
            return
        if claim.owned:
            claim.lease.revoke()

    def queue(self, shard: int) -> None:
        if shard in self._waiting:
            return
        self._waiting[shard] = self._hub.grant_lease(f"wait/{shard}", self._ttl)  # leak: cancel pops the waiting lease and drops it

    def cancel(self, shard: int) -> bool:
        return self._waiting.pop(shard, None) is not None

    def close(self) -> None:
        for shard in list(self._claims):
            self.drop(shard)
        for lease in self._waiting.values():
            lease.revoke()
        self._waiting.clear()


def with_retries(hub: HubClient, key: str, ttl: float, attempts: int) -> Optional[Any]:
    for attempt in range(attempts):
        try:
            return hub.grant_lease(key, ttl)  # clean: returned to the caller
        except HubUnavailable:
            time.sleep(0.1 * 2**attempt)
    return None


def obtain(hub: HubClient, key: str, ttl: float) -> Optional[Any]:
    lease = with_retries(hub, key, ttl, attempts=4)  # clean: passed on to the caller
    if lease is None:
        log.warning("no lease for %s", key)
    return lease


def run_exclusive(hub: HubClient, key: str, job: Callable[[], int]) -> int:
    lease = obtain(hub, key, 30.0)  # clean: near miss, the None return holds nothing and the finally revokes
    if lease is None:
        return -1
    try:
        return job()
    finally:
        lease.revoke()


def run_quorum(hub: HubClient, keys: List[str], job: Callable[[], int]) -> int:
    leases = []
    for key in keys:
        lease = obtain(hub, key, 30.0)  # leak: without a quorum the leases collected so far are dropped
        if lease is not None:
            leases.append(lease)
    if len(leases) * 2 <= len(keys):
        return -1
    code = job()
    for lease in leases:
        hub.surrender(lease=lease)
    return code


def assign(hub: HubClient, worker: str, shards: List[int]) -> Assignment:
    assignment = Assignment(worker)
    for shard in shards:
        lease = hub.grant_lease(f"shard/{shard}", 15.0)  # leak: a shard that is draining is skipped with its lease
        if hub.draining(shard):
            continue
        assignment.claims.append(ShardClaim(shard, lease))
    return assignment


def delegate(hub: HubClient, key: str, target: str) -> bool:
    lease = hub.grant_lease(key, 60.0)  # clean: near miss, either handed over or revoked
    accepted = hub.offer(target, lease.token)
    if accepted:
        hub.hand_over(target=target, lease=lease)
    if not accepted:
        lease.revoke()
    return accepted
