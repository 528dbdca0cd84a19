from __future__ import annotations

import time

from .leases import HostLeases, Lease


class LeaseTable:
    """Which job holds what.  The table answers for every lease put in it."""

    def __init__(self, leases: HostLeases) -> None:
        self.leases = leases
        self.by_job: dict[str, list[Lease]] = {}

    def hold(self, job: str, lease: Lease) -> None:
        self.by_job.setdefault(job, []).append(lease)

    def held(self, job: str) -> int:
        return sum(l.slots for l in self.by_job.get(job, ()))

    def settle_job(self, job: str) -> None:
        for lease in self.by_job.pop(job, []):
            self.leases.surrender(lease)

    def expire(self) -> int:
        now = time.monotonic()
        n = 0
        for job, held in self.by_job.items():
            fresh = []
            for lease in held:
                if lease.until < now:
                    self.leases.surrender(lease)
                    n += 1
                else:
                    fresh.append(lease)
            self.by_job[job] = fresh
        return n

    def extend(self, job: str, host: str, slots: int) -> bool:
        lease = self.leases.issue(host, slots)  # clean: hold() keeps it, settle_job() surrenders it
        if lease is None:
            return False
        self.hold(job, lease)
        return True


class Reservations:
    """Leases put aside for jobs that are still uploading their code."""

    def __init__(self, table: LeaseTable) -> None:
        self.table = table
        self.aside: dict[str, Lease] = {}

    def reserve(self, job: str, host: str, slots: int) -> bool:
        lease = self.table.leases.issue(host, slots)  # leak: a second reservation of a job overwrites the first
        if lease is None:
            return False
        self.aside[job] = lease
        return True

    def claim(self, job: str) -> bool:
        lease = self.aside.pop(job, None)
        if lease is None:
            return False
        self.table.hold(job, lease)
        return True

    def cancel(self, job: str) -> None:
        lease = self.aside.pop(job, None)
        if lease is not None:
            self.table.leases.surrender(lease)
