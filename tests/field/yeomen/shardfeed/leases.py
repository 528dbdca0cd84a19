"""Leases on shards, so that no two ranks read the same one in an epoch."""
import logging
import threading
import time
import uuid
from typing import Dict, List, NamedTuple, Optional

log = logging.getLogger(__name__)


class LeaseLost(Exception):
    pass


class Lease(NamedTuple):
    shard: str
    token: str
    until: float


class Coordinator:
    """Client of the table that holds the leases."""

    def __init__(self, table, owner: str, ttl: float = 60.0):
        self.table = table
        self.owner = owner
        self.ttl = ttl
        self.held: Dict[str, Lease] = {}
        self._lock = threading.Lock()

    def claim(self, shard: str) -> Optional[Lease]:
        token = uuid.uuid4().hex
        until = time.time() + self.ttl
        if not self.table.insert_if_absent(shard, token, self.owner, until):  # clean: goes to the caller as the lease, nothing was inserted when it is false
            return None
        lease = Lease(shard, token, until)
        with self._lock:
            self.held[token] = lease
        return lease

    def claim_any(self, shards: List[str], most: int) -> List[Lease]:
        got: List[Lease] = []
        for shard in shards:
            lease = self.claim(shard)  # clean: None means that somebody else has it, the rest go to the caller
            if lease is not None:
                got.append(lease)
            if len(got) == most:
                break
        return got

    def steal(self, shard: str, dead_owner: str) -> Optional[Lease]:
        """Takes over the lease of an owner that is gone."""
        row = self.table.lookup(shard)
        if row is None or row["owner"] != dead_owner:
            return None
        lease = Lease(shard, uuid.uuid4().hex, time.time() + self.ttl)
        if not self.table.swap(shard, row["token"], lease.token, self.owner):  # leak: the lease is not entered in held when its owner turns out to be back
            return None
        if self.table.heartbeat_of(dead_owner) > time.time() - 5:
            log.warning("%s is alive after all", dead_owner)
            return None
        with self._lock:
            self.held[lease.token] = lease
        return lease

    def renew(self) -> None:
        with self._lock:
            leases = list(self.held.values())
        for lease in leases:
            if not self.table.extend(lease.shard, lease.token, time.time() + self.ttl):
                raise LeaseLost(lease.shard)

    def release(self, lease: Lease, finished: bool) -> None:
        with self._lock:
            self.held.pop(lease.token, None)
        self.table.remove(lease.shard, lease.token, finished)
