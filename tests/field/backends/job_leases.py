"""Worker leases for a job runner: a job holds one worker id while it runs."""
from __future__ import annotations

import heapq
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Callable

log = logging.getLogger("jobs")


@dataclass
class Job:
    job_id: str
    fn: Callable[[int], Any]
    retries: int = 2
    worker: int | None = None
    result: Any = None
    state: str = "queued"
    helpers: list[int] = field(default_factory=list)


class WorkerRoster:
    """Hands out worker ids, the lowest first."""

    def __init__(self, size: int) -> None:
        self._free = list(range(size))
        heapq.heapify(self._free)
        self._since: dict[int, float] = {}
        self._lock = threading.Lock()

    def lease(self) -> int | None:
        with self._lock:
            if not self._free:
                return None
            worker = heapq.heappop(self._free)  # clean: recorded and handed to the caller
            self._since[worker] = time.monotonic()
            return worker

    def lease_older(self, floor: int) -> int | None:
        """A worker id not below the floor (the low ones are kept for interactive jobs)."""
        with self._lock:
            while self._free:
                worker = heapq.heappop(self._free)  # leak: ids below the floor are popped and never pushed back
                if worker >= floor:
                    self._since[worker] = time.monotonic()
                    return worker
            return None

    def end_lease(self, worker: int) -> None:
        with self._lock:
            if self._since.pop(worker, None) is not None:
                heapq.heappush(self._free, worker)


class Runner:
    def __init__(self, roster: WorkerRoster) -> None:
        self._roster = roster
        self._jobs: dict[str, Job] = {}
        self._leases: dict[str, int] = {}

    def start(self, job: Job) -> bool:
        if job.job_id in self._jobs or job.worker is not None:
            return False
        worker = self._roster.lease()  # clean: kept on the job, finish ends it
        if worker is None:
            return False
        job.worker = worker
        job.state = "running"
        self._jobs[job.job_id] = job
        return True

    def restart(self, job: Job) -> bool:
        if job.retries == 0:
            return False
        job.retries -= 1
        job.worker = self._roster.lease()  # leak: the worker already on the job is overwritten on restart
        job.state = "running" if job.worker is not None else "queued"
        return job.worker is not None

    def move(self, job: Job) -> bool:
        if job.worker is None:
            return False
        target = self._roster.lease()  # clean: near miss, the old worker is ended before the new one replaces it
        if target is None:
            return False
        self._roster.end_lease(job.worker)
        job.worker = target
        return True

    def add_helpers(self, job: Job, count: int) -> bool:
        for _ in range(count):
            helper = self._roster.lease()  # clean: near miss, a partial set is ended before False, the rest by finish
            if helper is None:
                self._drop_helpers(job)
                return False
            job.helpers.append(helper)
        return True

    def _drop_helpers(self, job: Job) -> None:
        while job.helpers:
            self._roster.end_lease(job.helpers.pop())

    def run_inline(self, job: Job) -> Any:
        worker = self._roster.lease()  # leak: the timeout handler records the state and returns with the lease
        if worker is None:
            return None
        try:
            job.result = job.fn(worker)
        except TimeoutError:
            job.state = "timeout"
            log.warning("job %s timed out on %d", job.job_id, worker)
            return None
        self._roster.end_lease(worker)
        job.state = "done"
        return job.result

    def run_retrying(self, job: Job) -> Any:
        for attempt in range(job.retries + 1):
            worker = self._roster.lease()  # clean: near miss, the finally ends it on break and on the next round
            if worker is None:
                break
            try:
                job.result = job.fn(worker)
                job.state = "done"
                break
            except TimeoutError:
                log.info("job %s attempt %d timed out", job.job_id, attempt)
            finally:
                self._roster.end_lease(worker)
        return job.result

    def reserve(self, job_id: str) -> bool:
        if job_id in self._leases:
            return True
        worker = self._roster.lease_older(2)  # leak: cancel pops the reservation and never ends the lease
        if worker is None:
            return False
        self._leases[job_id] = worker
        return True

    def cancel(self, job_id: str) -> bool:
        worker = self._leases.pop(job_id, None)
        if worker is None:
            return False
        log.info("reservation of %s on worker %d cancelled", job_id, worker)
        return True

    def use_reservation(self, job_id: str, fn: Callable[[int], Any]) -> Any:
        worker = self._leases.pop(job_id, None)
        if worker is None:
            return None
        try:
            return fn(worker)
        finally:
            self._roster.end_lease(worker)

    def finish(self, job_id: str) -> None:
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        self._drop_helpers(job)
        if job.worker is not None:
            self._roster.end_lease(job.worker)
            job.worker = None
        job.state = "finished"
