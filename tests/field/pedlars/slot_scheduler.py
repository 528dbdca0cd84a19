"""Scheduler of a job service: worker slots, memory reservations and the life of running tasks."""
from __future__ import annotations

import enum
import heapq
import itertools
import logging
import threading
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Protocol

LOG = logging.getLogger("sched")


class State(enum.Enum):
    QUEUED = 0
    RUNNING = 1
    DONE = 2
    FAILED = 3
    CANCELLED = 4


class WorkerSlots:
    def __init__(self, names: List[str]) -> None:
        self._open = list(names)
        self._lock = threading.Lock()

    def claim(self) -> Optional[str]:
        with self._lock:
            return self._open.pop() if self._open else None

    def relinquish(self, name: str) -> None:
        with self._lock:
            self._open.append(name)

    def spare(self) -> int:
        return len(self._open)


class MemoryBook:
    """Counts megabytes; a reservation must be refunded with the same amount."""

    def __init__(self, total: int) -> None:
        self.left = total

    def reserve(self, mb: int) -> bool:
        if mb > self.left:
            return False
        self.left -= mb
        return True

    def refund(self, mb: int) -> None:
        self.left += mb


class Runner(Protocol):
    def launch(self, worker: str, job_id: int) -> bool: ...

    def kill(self, worker: str, job_id: int) -> None: ...


@dataclass(order=True)
class Job:
    priority: int
    seq: int
    job_id: int = field(compare=False)
    mem: int = field(compare=False, default=0)
    state: State = field(compare=False, default=State.QUEUED)
    worker: Optional[str] = field(compare=False, default=None)
    attempts: int = field(compare=False, default=0)


class Scheduler:
    def __init__(self, slots: WorkerSlots, book: MemoryBook, runner: Runner) -> None:
        self.slots = slots
        self.book = book
        self.runner = runner
        self.queue: List[Job] = []
        self.running: Dict[int, Job] = {}
        self.finished: List[Job] = []
        self._seq = itertools.count()

    def submit(self, job_id: int, priority: int, mem: int) -> Job:
        job = Job(priority, next(self._seq), job_id, mem)
        heapq.heappush(self.queue, job)
        return job

    def tick(self) -> int:
        """Starts what fits."""
        started = 0
        while self.queue:
            worker = self.slots.claim()  # clean: near miss, in running until finish() or given back here
            if worker is None:
                break
            job = heapq.heappop(self.queue)
            if not self.book.reserve(job.mem):  # clean: near miss, refunded by _release()
                self.slots.relinquish(worker)
                heapq.heappush(self.queue, job)
                break
            job.worker = worker
            job.state = State.RUNNING
            job.attempts += 1
            self.running[job.job_id] = job
            if self.runner.launch(worker, job.job_id):
                started += 1
            else:
                self.finish(job.job_id, ok=False)
        return started

    def finish(self, job_id: int, ok: bool) -> None:
        job = self.running.pop(job_id, None)
        if job is None:
            return
        job.state = State.DONE if ok else State.FAILED
        self._release(job)
        self.finished.append(job)

    def cancel(self, job_id: int) -> bool:
        job = self.running.pop(job_id, None)
        if job is None:
            return False
        if job.worker is not None:
            self.runner.kill(job.worker, job_id)
        job.state = State.CANCELLED
        self._release(job)
        return True

    def _release(self, job: Job) -> None:
        if job.worker is not None:
            self.slots.relinquish(job.worker)
            job.worker = None
        self.book.refund(job.mem)

    def run_now(self, job: Job) -> bool:
        """An operator's start that jumps the queue."""
        worker = self.slots.claim()  # leak: kept when the launch is refused
        if worker is None:
            return False
        if not self.runner.launch(worker, job.job_id):
            LOG.warning("launch of %d refused by %s", job.job_id, worker)
            return False
        job.mem = 0
        job.worker = worker
        job.state = State.RUNNING
        self.running[job.job_id] = job
        return True

    def admit_batch(self, jobs: List[Job]) -> List[Job]:
        """Reserves for as many as fit; those not launched are dropped from the batch."""
        admitted: List[Job] = []
        for job in jobs:
            if not self.book.reserve(job.mem):  # leak: break for want of a worker keeps the last reservation
                continue
            worker = self.slots.claim()  # clean: in running until finish() or cancel()
            if worker is None:
                break
            job.worker = worker
            self.running[job.job_id] = job
            admitted.append(job)
        return admitted

    def gang(self, count: int) -> Optional[List[str]]:
        """All or nothing."""
        got: List[str] = []
        while len(got) < count:
            worker = self.slots.claim()  # clean: near miss, returned to the caller or relinquished
            if worker is None:
                for w in got:
                    self.slots.relinquish(w)
                return None
            got.append(worker)
        return got

    def run_gang(self, job_id: int, count: int) -> int:
        workers = self.gang(count)  # leak: those refused by the runner are filtered away
        if workers is None:
            return 0
        alive = [w for w in workers if self.runner.launch(w, job_id)]
        for w in alive:
            self.runner.kill(w, job_id)
            self.slots.relinquish(w)
        return len(alive)

    def dry_gang(self, count: int) -> bool:
        workers = self.gang(count)  # clean: given back in the loop
        if workers is None:
            return False
        for w in workers:
            self.slots.relinquish(w)
        return True


class RetryQueue:
    """Failed jobs keep their worker while they wait, so that the local cache is still warm."""

    def __init__(self, slots: WorkerSlots, runner: Runner, limit: int) -> None:
        self.slots = slots
        self.runner = runner
        self.limit = limit
        self.parked: Dict[int, Job] = {}
        self.abandoned = 0

    def park(self, job: Job) -> bool:
        if job.worker is None:
            job.worker = self.slots.claim()  # leak: sweep() drops jobs over the limit with their worker
        if job.worker is None:
            return False
        self.parked[job.job_id] = job
        return True

    def sweep(self) -> int:
        tried = 0
        for job_id in list(self.parked):
            job = self.parked.pop(job_id)
            if job.attempts >= self.limit:
                self.abandoned += 1
                job.state = State.FAILED
                continue
            job.attempts += 1
            tried += 1
            self.runner.launch(job.worker, job_id)
            self.slots.relinquish(job.worker)
            job.worker = None
        return tried


class Drain:
    """Takes workers out of service for an upgrade."""

    def __init__(self, slots: WorkerSlots) -> None:
        self.slots = slots
        self.held: List[str] = []
        self.borrowed = False

    def begin(self, count: int, reuse: Optional[List[str]] = None) -> int:
        if self.held:
            return 0
        if reuse is not None:
            self.held = reuse
            self.borrowed = True
            return len(reuse)
        self.borrowed = False
        for _ in range(count):
            name = self.slots.claim()  # clean: near miss, end() gives back what is not borrowed
            if name is None:
                break
            self.held.append(name)
        return len(self.held)

    def end(self) -> None:
        if not self.borrowed:
            for name in self.held:
                self.slots.relinquish(name)
        self.held = []

    def rotate(self, upgrade: Callable[[str], bool], count: int) -> int:
        done = 0
        for _ in range(count):
            name = self.slots.claim()  # leak: break after a failed upgrade keeps the worker out
            if name is None:
                break
            if not upgrade(name):
                LOG.error("upgrade of %s failed", name)
                break
            self.slots.relinquish(name)
            done += 1
        return done
