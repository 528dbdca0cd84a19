"""Lease based job queue for the training orchestrator."""
from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass, field
from typing import Callable

log = logging.getLogger(__name__)


class LeaseExpired(Exception):
    pass


@dataclass
class Job:
    job_id: int
    kind: str
    params: dict = field(default_factory=dict)
    attempts: int = 0


@dataclass
class Lease:
    token: int
    job: Job
    deadline: float

    @property
    def expired(self) -> bool:
        return time.monotonic() > self.deadline


class JobQueue:
    """claim() takes a job out of its queue; ack() or nack() must end the lease."""

    def __init__(self, ttl: float = 60.0) -> None:
        self.ttl = ttl
        self._ready: dict[str, list[Job]] = {}
        self._leased: dict[int, Lease] = {}
        self._tokens = itertools.count(1)

    def put(self, job: Job) -> None:
        self._ready.setdefault(job.kind, []).append(job)

    def claim(self, kind: str) -> Lease | None:
        jobs = self._ready.get(kind)
        if not jobs:
            return None
        job = jobs.pop(0)  # clean: goes out in the lease
        lease = Lease(next(self._tokens), job, time.monotonic() + self.ttl)
        self._leased[lease.token] = lease
        return lease

    def ack(self, lease: Lease) -> None:
        self._leased.pop(lease.token, None)

    def nack(self, lease: Lease) -> None:
        if self._leased.pop(lease.token, None) is not None:
            lease.job.attempts += 1
            self.put(lease.job)

    def outstanding(self) -> int:
        return len(self._leased)


class Orchestrator:
    MAX_ATTEMPTS = 3

    def __init__(self, queue: JobQueue, handlers: dict[str, Callable[[Job], bool]]) -> None:
        self.queue = queue
        self.handlers = handlers
        self.active: dict[int, Lease] = {}
        self.dead: list[Job] = []

    def _claim_any(self, kinds: list[str]) -> Lease | None:
        for kind in kinds:
            lease = self.queue.claim(kind)  # clean: the found lease is returned
            if lease is not None:
                return lease
        return None

    def run_one(self, kinds: list[str]) -> bool:
        lease = self._claim_any(kinds)  # clean: acked or nacked on both arms
        if lease is None:
            return False
        ok = self.handlers[lease.job.kind](lease.job)
        if ok:
            self.queue.ack(lease)
        else:
            self.queue.nack(lease)
        return True

    def run_guarded(self, kind: str) -> bool:
        lease = self.queue.claim(kind)  # leak: the ValueError handler logs and returns without nack
        if lease is None:
            return False
        try:
            self.handlers[kind](lease.job)
        except TimeoutError:
            self.queue.nack(lease)
            return False
        except ValueError as exc:
            log.error("job %d has bad parameters: %s", lease.job.job_id, exc)
            return False
        self.queue.ack(lease)
        return True

    def run_or_bury(self, kind: str) -> None:
        lease = self.queue.claim(kind)  # clean: near miss, the burying arm acks too
        if lease is None:
            return
        if lease.job.attempts >= self.MAX_ATTEMPTS:
            self.dead.append(lease.job)
            self.queue.ack(lease)
            return
        if self.handlers[kind](lease.job):
            self.queue.ack(lease)
            return
        self.queue.nack(lease)

    def start(self, worker: int, kind: str) -> bool:
        if worker in self.active:
            return False
        lease = self.queue.claim(kind)  # clean: near miss, kept in active, ended by report or cancel
        if lease is None:
            return False
        self.active[worker] = lease
        return True

    def report(self, worker: int, ok: bool) -> None:
        lease = self.active.pop(worker)
        (self.queue.ack if ok else self.queue.nack)(lease)

    def cancel(self, worker: int) -> None:
        lease = self.active.pop(worker, None)
        if lease is not None:
            self.queue.nack(lease)

    def restart(self, worker: int, kind: str) -> bool:
        lease = self.queue.claim(kind)  # leak: replaces the lease the worker already has in active
        if lease is None:
            return False
        self.active[worker] = lease
        return True

    def drain(self, kind: str, limit: int) -> list[int]:
        """Finish up to limit jobs of one kind that only need bookkeeping."""
        finished: list[int] = []
        while lease := self.queue.claim(kind):  # leak: the break at the limit leaves the last lease open
            if len(finished) >= limit:
                break
            finished.append(lease.job.job_id)
            self.queue.ack(lease)
        return finished

    def checked(self, kind: str) -> Job:
        lease = self.queue.claim(kind)  # leak: an expired lease is raised about, not given back
        if lease is None:
            raise LookupError(kind)
        if lease.expired:
            raise LeaseExpired(lease.token)
        self.queue.ack(lease)
        return lease.job

    def claim_pair(self, a: str, b: str) -> tuple[Lease, Lease] | None:
        left = self.queue.claim(a)  # clean: near miss, nacked if there is no right, else returned
        right = self.queue.claim(b) if left is not None else None  # clean: returned with left
        if left is None:
            return None
        if right is None:
            self.queue.nack(left)
            return None
        return left, right

    def run_pair(self, a: str, b: str, fn: Callable[[Job, Job], None]) -> bool:
        pair = self.claim_pair(a, b)  # clean: both leases acked in the loop
        if pair is None:
            return False
        fn(pair[0].job, pair[1].job)
        for lease in pair:
            self.queue.ack(lease)
        return True
