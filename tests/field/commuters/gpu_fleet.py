"""Fleet allocator: places replicas on hosts, GPUs tracked as bitmaps per host."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Optional

log = logging.getLogger("fleet")


@dataclass(frozen=True)
class GpuLease:
    host: str
    mask: int

    @property
    def count(self) -> int:
        return self.mask.bit_count()


@dataclass
class Replica:
    model: str
    gpus: int
    lease: Optional[GpuLease] = None
    spare: Optional[GpuLease] = None
    healthy: bool = True


class HostGpus:
    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self._free_mask = (1 << count) - 1
        self.cordoned = False

    @property
    def free(self) -> int:
        return self._free_mask.bit_count()

    def claim(self, count: int) -> Optional[GpuLease]:
        if self.cordoned or self.free < count:
            return None
        mask = 0
        for _ in range(count):
            low = self._free_mask & -self._free_mask
            self._free_mask &= ~low  # clean: the bits travel in the lease
            mask |= low
        return GpuLease(self.name, mask)

    def claim_aligned(self, count: int) -> Optional[GpuLease]:
        window = (1 << count) - 1
        for shift in range(0, 16, count):
            mask = window << shift
            if self._free_mask & mask == mask:
                self._free_mask &= ~mask  # clean: leaves as a lease
                return GpuLease(self.name, mask)
        return None

    def surrender(self, lease: GpuLease) -> None:
        self._free_mask |= lease.mask


class Placer:
    def __init__(self, hosts: dict[str, HostGpus]) -> None:
        self.hosts = hosts
        self.replicas: dict[str, Replica] = {}

    def _claim_anywhere(self, count: int) -> Optional[GpuLease]:
        for host in sorted(self.hosts.values(), key=lambda h: h.free):
            lease = host.claim_aligned(count)  # clean: near miss, only None goes round the loop
            if lease is None:
                continue
            return lease
        return None

    def _drop(self, lease: GpuLease) -> None:
        self.hosts[lease.host].surrender(lease)

    def deploy(self, key: str, replica: Replica) -> bool:
        if key in self.replicas:
            return False
        lease = self._claim_anywhere(replica.gpus)  # clean: kept in the replica, destroy drops it
        if lease is None:
            return False
        replica.lease = lease
        self.replicas[key] = replica
        return True

    def deploy_with_spare(self, key: str, replica: Replica) -> bool:
        if key in self.replicas:
            return False
        lease = self._claim_anywhere(replica.gpus)  # leak: kept by nobody when no spare was found
        if lease is None:
            return False
        spare = self._claim_anywhere(1)  # clean: goes into the replica together with the main lease
        if spare is None:
            log.info("no spare for %s", key)
            return False
        replica.lease, replica.spare = lease, spare
        self.replicas[key] = replica
        return True

    def migrate(self, key: str, avoid: str) -> bool:
        replica = self.replicas[key]
        target = self._claim_anywhere(replica.gpus)  # leak: when it landed on the host to avoid it is never dropped
        if target is None:
            return False
        if target.host == avoid:
            log.warning("only %s has room for %s", avoid, key)
            return False
        if replica.lease is not None:
            self._drop(replica.lease)
        replica.lease = target
        return True

    def heal(self, key: str) -> None:
        replica = self.replicas[key]
        if replica.healthy:
            return
        replica.lease = self._claim_anywhere(replica.gpus)  # leak: the sick replica's lease is overwritten
        replica.healthy = replica.lease is not None

    def promote_spare(self, key: str) -> bool:
        replica = self.replicas[key]
        if replica.spare is None:
            replica.spare = self._claim_anywhere(1)  # clean: near miss, the field was empty and destroy drops it
        return replica.spare is not None

    def destroy(self, key: str) -> None:
        replica = self.replicas.pop(key)
        for lease in (replica.lease, replica.spare):
            if lease is not None:
                self._drop(lease)
        replica.lease = replica.spare = None


def gang(hosts: list[HostGpus], per_host: int, wanted: int) -> list[GpuLease]:
    """All or nothing."""
    got: list[tuple[HostGpus, GpuLease]] = []
    for host in hosts:
        lease = host.claim(per_host)  # clean: near miss, surrendered below when the gang is incomplete
        if lease is not None:
            got.append((host, lease))
        if len(got) == wanted:
            return [l for _, l in got]
    for host, lease in got:
        host.surrender(lease)
    return []


def benchmark(host: HostGpus, sizes: list[int], measure) -> dict[int, float]:
    results: dict[int, float] = {}
    for size in sizes:
        lease = host.claim(size)  # leak: a failed measurement breaks out with the lease
        if lease is None:
            continue
        seconds = measure(lease)
        if seconds is None:
            break
        results[size] = seconds
        host.surrender(lease)
    return results


def largest_fit(host: HostGpus) -> int:
    size = host.free
    while size > 0:
        lease = host.claim_aligned(size)  # clean: given back before the answer
        if lease is not None:
            host.surrender(lease)
            return size
        size //= 2
    return 0
