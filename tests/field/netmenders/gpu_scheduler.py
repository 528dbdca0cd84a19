"""Job scheduler that leases GPUs of one node to training jobs."""
from __future__ import annotations

import enum
import heapq
import itertools
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Callable, Optional

log = logging.getLogger("sched")


class State(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class GpuLease:
    serial: int
    device: int
    holder: str


class GpuInventory:
    """Devices of the node. ``lease`` raises when none is idle, ``try_lease`` answers None."""

    class Exhausted(RuntimeError):
        pass

    def __init__(self, devices: int):
        self._idle = set(range(devices))
        self._held: dict[int, GpuLease] = {}
        self._serial = itertools.count(1)
        self._mu = threading.RLock()

    def try_lease(self, holder: str) -> Optional[GpuLease]:
        with self._mu:
            if not self._idle:
                return None
            dev = min(self._idle)
            self._idle.discard(dev)
            lease = GpuLease(next(self._serial), dev, holder)
            self._held[lease.serial] = lease
            return lease

    def lease(self, holder: str) -> GpuLease:
        got = self.try_lease(holder)  # clean: handed to the caller, None becomes an error
        if got is None:
            raise GpuInventory.Exhausted(holder)
        return got

    def revoke(self, lease: GpuLease) -> None:
        with self._mu:
            if self._held.pop(lease.serial, None) is not None:
                self._idle.add(lease.device)

    def lease_many(self, holder: str, n: int) -> list[GpuLease]:
        out: list[GpuLease] = []
        try:
            for _ in range(n):
                out.append(self.lease(holder))  # clean: near miss, those got are revoked when one is missing
        except GpuInventory.Exhausted:
            for g in out:
                self.revoke(g)
            raise
        return out

    def idle_count(self) -> int:
        return len(self._idle)


@dataclass(order=True)
class Job:
    rank: int
    name: str = field(compare=False)
    gpus: int = field(compare=False, default=1)
    entry: Callable[[list[int]], int] = field(compare=False, default=lambda devs: 0)
    state: State = field(compare=False, default=State.QUEUED)
    leases: list[GpuLease] = field(compare=False, default_factory=list)
    spares: list[GpuLease] = field(compare=False, default_factory=list)
    retries: int = field(compare=False, default=0)
    deadline: float = field(compare=False, default=0.0)


class Scheduler:
    def __init__(self, inv: GpuInventory):
        self.inv = inv
        self.queue: list[Job] = []
        self.running: dict[str, Job] = {}
        self.debug_lease: Optional[GpuLease] = None

    def submit(self, job: Job) -> None:
        heapq.heappush(self.queue, job)

    def dispatch(self) -> int:
        started = 0
        while self.queue and self.inv.idle_count() >= self.queue[0].gpus:
            job = heapq.heappop(self.queue)
            try:
                job.leases = self.inv.lease_many(job.name, job.gpus)  # clean: job is in running, complete() revokes its leases
            except GpuInventory.Exhausted:
                heapq.heappush(self.queue, job)
                break
            job.state = State.RUNNING
            self.running[job.name] = job
            started += 1
        return started

    def dispatch_gang(self, jobs: list[Job]) -> bool:
        """All of the gang or none of it."""
        taken: dict[str, list[GpuLease]] = {job.name: [] for job in jobs}
        for job in jobs:
            for _ in range(job.gpus):
                lease = self.inv.try_lease(job.name)  # leak: leases of the gang so far stay when one is missing
                if lease is None:
                    log.info("gang of %d does not fit", len(jobs))
                    return False
                taken[job.name].append(lease)
        for job in jobs:
            job.leases = taken[job.name]
            job.state = State.RUNNING
            self.running[job.name] = job
        return True

    def backfill(self, limit: int) -> int:
        n = 0
        skipped: list[Job] = []
        while self.queue and n < limit:
            job = heapq.heappop(self.queue)
            lease = self.inv.try_lease(job.name)  # leak: an expired job is dropped with the lease taken for it
            if lease is None:
                skipped.append(job)
                break
            if job.deadline and time.time() > job.deadline:
                job.state = State.FAILED
                continue
            if job.gpus > 1:
                self.inv.revoke(lease)
                skipped.append(job)
                continue
            job.leases = [lease]
            job.state = State.RUNNING
            self.running[job.name] = job
            n += 1
        for job in skipped:
            heapq.heappush(self.queue, job)
        return n

    def complete(self, name: str, ok: bool) -> None:
        job = self.running.pop(name, None)
        if job is None:
            return
        for lease in job.leases + job.spares:
            self.inv.revoke(lease)
        job.leases, job.spares = [], []
        if ok:
            job.state = State.DONE
        elif job.retries < 3:
            job.retries += 1
            job.state = State.QUEUED
            self.submit(job)
        else:
            job.state = State.FAILED

    def grow(self, name: str, by: int) -> bool:
        job = self.running[name]
        try:
            extra = self.inv.lease_many(name, by)  # clean: near miss, joins job.leases, which complete() empties
        except GpuInventory.Exhausted:
            return False
        job.leases.extend(extra)
        return True

    def set_spares(self, name: str, to: int) -> bool:
        job = self.running[name]
        try:
            fresh = self.inv.lease_many(name, to)  # leak: assigned over the spares of an earlier call
        except GpuInventory.Exhausted:
            return False
        job.spares = fresh
        return True

    def migrate(self, name: str) -> bool:
        job = self.running[name]
        moved: list[GpuLease] = []
        for old in job.leases:
            new = self.inv.try_lease(name)  # clean: near miss, on shortage the new ones are revoked, else the old ones
            if new is None:
                for m in moved:
                    self.inv.revoke(m)
                return False
            moved.append(new)
        for old in job.leases:
            self.inv.revoke(old)
        job.leases = moved
        return True

    def preempt_for(self, urgent: Job) -> bool:
        victims = sorted(self.running.values(), reverse=True)
        for victim in victims:
            if victim.rank <= urgent.rank:
                break
            self.complete(victim.name, ok=False)
            if self.inv.idle_count() >= urgent.gpus:
                urgent.leases = self.inv.lease_many(urgent.name, urgent.gpus)  # clean: urgent is put in running
                urgent.state = State.RUNNING
                self.running[urgent.name] = urgent
                return True
        return False

    def run_inline(self, job: Job) -> int:
        leases = self.inv.lease_many(job.name, job.gpus)  # clean: revoked in finally
        try:
            return job.entry([g.device for g in leases])
        finally:
            for g in leases:
                self.inv.revoke(g)

    def smoke_test(self, entry: Callable[[list[int]], int]) -> bool:
        lease = self.inv.lease("smoke")  # leak: not revoked when the entry exits with a non-zero code
        code = entry([lease.device])
        if code != 0:
            log.error("smoke test on gpu %d: code %d", lease.device, code)
            return False
        self.inv.revoke(lease)
        return True

    def attach_debugger(self) -> int:
        if self.debug_lease is None:
            self.debug_lease = self.inv.lease("debug")  # clean: one at most, detach_debugger() revokes it
        return self.debug_lease.device

    def detach_debugger(self) -> None:
        if self.debug_lease is not None:
            self.inv.revoke(self.debug_lease)
            self.debug_lease = None
