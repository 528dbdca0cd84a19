"""Distributed cron: a job runs only under a named lease and inside a worker slot."""
from __future__ import annotations

import heapq
import logging
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Callable, Optional

log = logging.getLogger("cron")


@dataclass
class Lease:
    name: str
    token: int
    until: float


class LeaseTable:
    def __init__(self, ttl: float) -> None:
        self.ttl = ttl
        self._held: dict[str, Lease] = {}
        self._token = 0
        self._lock = threading.Lock()

    def grab(self, name: str) -> Optional[Lease]:
        with self._lock:
            if name in self._held:
                return None
            self._token += 1
            lease = Lease(name, self._token, time.time() + self.ttl)
            self._held[name] = lease
            return lease

    def surrender(self, lease: Lease) -> None:
        with self._lock:
            if self._held.get(lease.name) is lease:
                del self._held[lease.name]

    def extend(self, lease: Lease) -> None:
        lease.until = time.time() + self.ttl


class WorkerSlots:
    """Numbered slots. occupy() gives a number or -1; vacate() frees it."""

    def __init__(self, count: int) -> None:
        self._busy = [False] * count
        self._lock = threading.Lock()

    def occupy(self) -> int:
        with self._lock:
            for number, busy in enumerate(self._busy):
                if not busy:
                    self._busy[number] = True
                    return number
        return -1

    def vacate(self, number: int) -> None:
        with self._lock:
            self._busy[number] = False


@dataclass(order=True)
class Job:
    due: float
    name: str = field(compare=False)
    action: Callable[[], object] = field(compare=False)
    every: float = field(default=60.0, compare=False)
    paused: bool = field(default=False, compare=False)
    retries: int = field(default=0, compare=False)


class Scheduler:
    def __init__(self, leases: LeaseTable, slots: WorkerSlots) -> None:
        self.leases = leases
        self.slots = slots
        self.queue: list[Job] = []
        self.running: dict[str, tuple[Lease, int]] = {}
        self.history: list[str] = []

    def add(self, job: Job) -> None:
        heapq.heappush(self.queue, job)

    def start_due(self, now: float) -> int:
        started = 0
        while self.queue and self.queue[0].due <= now:
            job = heapq.heappop(self.queue)
            lease = self.leases.grab(job.name)  # leak: no free slot pushes the job back with its lease held
            if lease is None:
                continue
            slot = self.slots.occupy()  # clean: filed in running, finish() vacates it
            if slot < 0:
                job.due = now + 1.0
                heapq.heappush(self.queue, job)
                break
            self.running[job.name] = (lease, slot)
            threading.Thread(target=self._work, args=(job,), daemon=True).start()
            started += 1
        return started

    def _work(self, job: Job) -> None:
        try:
            job.action()
        finally:
            self.finish(job)

    def finish(self, job: Job) -> None:
        lease, slot = self.running.pop(job.name)
        self.slots.vacate(slot)
        self.leases.surrender(lease)
        self.history.append(job.name)

    def run_now(self, job: Job) -> bool:
        slot = self.slots.occupy()  # clean: vacated on every way where it is valid
        if slot == -1:
            return False
        lease = self.leases.grab(job.name)  # clean: surrendered after the action, else None
        if lease is None:
            self.slots.vacate(slot)
            return False
        try:
            job.action()
        finally:
            self.leases.surrender(lease)
            self.slots.vacate(slot)
        return True

    def run_inline(self, jobs: list[Job]) -> int:
        ran = 0
        for job in jobs:
            lease = self.leases.grab(job.name)  # leak: a paused job continues with the lease
            if not lease:
                continue
            if job.paused:
                log.info("%s is paused", job.name)
                continue
            job.action()
            ran += 1
            self.leases.surrender(lease)
        return ran

    def handover(self, job: Job, peer: "Scheduler") -> bool:
        lease = self.leases.grab(job.name)  # clean: near miss, moved into the peer's running table
        if lease is None:
            return False
        slot = peer.slots.occupy()  # clean: moved with the lease, finish() of the peer frees both
        if slot < 0:
            self.leases.surrender(lease)
            return False
        peer.running[job.name] = (lease, slot)
        threading.Thread(target=peer._work, args=(job,), daemon=True).start()
        return True


def with_retry(leases: LeaseTable, job: Job, attempts: int, pause: float) -> bool:
    for attempt in range(attempts):
        lease = leases.grab(job.name)  # clean: near miss, surrendered in each round that got it
        if lease is None:
            time.sleep(pause + random.random())
            continue
        try:
            if job.action():
                return True
        finally:
            leases.surrender(lease)
        job.retries = attempt + 1
    return False


def acquire_patiently(leases: LeaseTable, name: str, attempts: int) -> Optional[Lease]:
    lease = None
    while attempts > 0 and lease is None:
        lease = leases.grab(name)  # clean: near miss, loop only goes on while None, returned after
        if lease is None:
            time.sleep(0.05)
        attempts -= 1
    return lease


def migrate_names(leases: LeaseTable, old: str, new: str) -> bool:
    source = acquire_patiently(leases, old, 10)  # leak: surrendered only when the second one came too
    target = acquire_patiently(leases, new, 10)  # leak: held when only the first one was denied
    if source is None or target is None:
        log.warning("cannot migrate %s to %s", old, new)
        return False
    leases.extend(target)
    leases.surrender(source)
    leases.surrender(target)
    return True


class Leader:
    """Campaigns for leadership; tick() is called every second."""

    def __init__(self, leases: LeaseTable, role: str) -> None:
        self.leases = leases
        self.role = role
        self.mine: Optional[Lease] = None
        self.terms = 0

    def tick(self) -> bool:
        if self.mine is not None:
            self.leases.extend(self.mine)
            return True
        self.mine = self.leases.grab(self.role)  # clean: resign() surrenders it
        if self.mine is not None:
            self.terms += 1
        return self.mine is not None

    def resign(self) -> None:
        if self.mine is not None:
            self.leases.surrender(self.mine)
            self.mine = None


class SlotGang:
    """A gang job takes several slots together or none."""

    def __init__(self, slots: WorkerSlots) -> None:
        self.slots = slots

    def muster(self, size: int) -> list[int]:
        got: list[int] = []
        for _ in range(size):
            number = self.slots.occupy()  # clean: near miss, all vacated when one is missing, else returned
            if number < 0:
                for taken in got:
                    self.slots.vacate(taken)
                return []
            got.append(number)
        return got

    def muster_some(self, least: int, most: int) -> list[int]:
        got: list[int] = []
        while len(got) < most:
            number = self.slots.occupy()  # leak: too few of them return an empty list and stay busy
            if number < 0:
                break
            got.append(number)
        if len(got) < least:
            return []
        return got

    def run(self, size: int, action: Callable[[int], None]) -> bool:
        gang = self.muster(size)  # clean: each vacated after its turn
        for number in gang:
            action(number)
            self.slots.vacate(number)
        return bool(gang)
