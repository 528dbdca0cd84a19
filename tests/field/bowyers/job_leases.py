"""Job lease table for the fine-tuning queue: workers claim jobs and settle them."""
from __future__ import annotations

import enum
import itertools
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Callable, Optional

log = logging.getLogger(__name__)


class JobState(enum.Enum):
    READY = "ready"
    LEASED = "leased"
    DONE = "done"
    DEAD = "dead"


@dataclass
class Job:
    job_id: str
    kind: str
    payload: dict
    tries: int = 0
    state: JobState = JobState.READY


@dataclass
class Lease:
    token: int
    job: Job
    worker: str
    deadline: float


class LeaseTable:
    """A lease must be settled by complete(), abandon() or bury(); nothing expires by itself."""

    def __init__(self, ttl: float = 60.0) -> None:
        self._ttl = ttl
        self._ready: list[Job] = []
        self._leases: dict[int, Lease] = {}
        self._tokens = itertools.count(1)
        self._mu = threading.Lock()

    def enqueue(self, job: Job) -> None:
        with self._mu:
            self._ready.append(job)

    def claim(self, worker: str, kind: Optional[str] = None) -> Optional[Lease]:
        with self._mu:
            for i, job in enumerate(self._ready):
                if kind is None or job.kind == kind:
                    del self._ready[i]
                    break
            else:
                return None
            job.state = JobState.LEASED
            job.tries += 1
            lease = Lease(next(self._tokens), job, worker, time.monotonic() + self._ttl)
            self._leases[lease.token] = lease
            return lease

    def extend(self, lease: Lease) -> None:
        with self._mu:
            lease.deadline = time.monotonic() + self._ttl

    def complete(self, lease: Lease) -> None:
        with self._mu:
            self._leases.pop(lease.token)
            lease.job.state = JobState.DONE

    def abandon(self, lease: Lease) -> None:
        with self._mu:
            self._leases.pop(lease.token)
            lease.job.state = JobState.READY
            self._ready.append(lease.job)

    def bury(self, lease: Lease) -> None:
        with self._mu:
            self._leases.pop(lease.token)
            lease.job.state = JobState.DEAD


Handler = Callable[[dict], bool]


class Worker:
    MAX_TRIES = 5

    def __init__(self, name: str, table: LeaseTable, handlers: dict[str, Handler]) -> None:
        self.name = name
        self._table = table
        self._handlers = handlers
        self._stop = threading.Event()
        self.processed = 0

    def stop(self) -> None:
        self._stop.set()

    def run(self, idle_sleep: float = 0.2) -> None:
        while not self._stop.is_set():
            lease = self._table.claim(self.name)  # clean: near miss, every branch of _settle ends the lease
            if lease is None:
                time.sleep(idle_sleep)
                continue
            handler = self._handlers.get(lease.job.kind)
            self._settle(lease, handler is not None and handler(lease.job.payload))

    def _settle(self, lease: Lease, ok: bool) -> None:
        if ok:
            self._table.complete(lease)
            self.processed += 1
        elif lease.job.tries >= self.MAX_TRIES:
            log.error("job %s failed %d times", lease.job.job_id, lease.job.tries)
            self._table.bury(lease)
        else:
            self._table.abandon(lease)

    def run_kind(self, kind: str, limit: int) -> int:
        done = 0
        while done < limit:
            lease = self._table.claim(self.name, kind)  # leak: continue after an unknown kind settles nothing
            if lease is None:
                break
            handler = self._handlers.get(lease.job.kind)
            if handler is None:
                log.warning("no handler for %s", lease.job.kind)
                done += 1
                continue
            self._settle(lease, handler(lease.job.payload))
            done += 1
        return done

    def drain_until(self, deadline: float) -> int:
        count = 0
        while True:
            lease = self._table.claim(self.name)  # leak: the break at the deadline keeps it
            if lease is None:
                break
            if time.monotonic() > deadline:
                log.info("deadline reached after %d jobs", count)
                break
            handler = self._handlers[lease.job.kind]
            self._settle(lease, handler(lease.job.payload))
            count += 1
        return count

    def drain_checked(self, deadline: float) -> int:
        count = 0
        while time.monotonic() <= deadline:
            lease = self._table.claim(self.name)  # clean: settled before the next turn
            if lease is None:
                return count
            if lease.job.payload.get("not_before", 0) > time.time():
                self._table.abandon(lease)
                break
            handler = self._handlers[lease.job.kind]
            self._settle(lease, handler(lease.job.payload))
            count += 1
        return count


class Heartbeat:
    """Keeps the leases of one process alive; leases leave by finish() or shutdown()."""

    def __init__(self, table: LeaseTable) -> None:
        self._table = table
        self._held: dict[str, Lease] = {}

    def take(self, worker: str, kind: str) -> Optional[str]:
        lease = self._table.claim(worker, kind)  # clean: near miss, in _held until finish() or shutdown()
        if lease is None:
            return None
        self._held[lease.job.job_id] = lease
        return lease.job.job_id

    def beat(self) -> None:
        for lease in self._held.values():
            self._table.extend(lease)

    def finish(self, job_id: str, ok: bool) -> None:
        lease = self._held.pop(job_id)
        if ok:
            self._table.complete(lease)
        else:
            self._table.abandon(lease)

    def shutdown(self) -> None:
        while self._held:
            _, lease = self._held.popitem()
            self._table.abandon(lease)


@dataclass
class Gang:
    """Jobs that must start together, one lease for each member."""

    name: str
    members: list[Lease] = field(default_factory=list)


class GangScheduler:
    def __init__(self, table: LeaseTable) -> None:
        self._table = table
        self._gangs: dict[str, Gang] = {}

    def form(self, name: str, kind: str, size: int) -> bool:
        if name in self._gangs:
            return False
        gang = Gang(name)
        for rank in range(size):
            lease = self._table.claim(f"{name}/{rank}", kind)  # clean: rolled back, or ended by disband()
            if lease is None:
                for member in gang.members:
                    self._table.abandon(member)
                return False
            gang.members.append(lease)
        self._gangs[name] = gang
        return True

    def disband(self, name: str) -> None:
        gang = self._gangs.pop(name)
        for member in gang.members:
            self._table.complete(member)


class PairScheduler:
    """Trainer and evaluator jobs run side by side, keyed by experiment."""

    def __init__(self, table: LeaseTable) -> None:
        self._table = table
        self._pairs: dict[str, tuple[Lease, Lease]] = {}
        self._finished: list[str] = []

    def start(self, experiment: str) -> bool:
        if experiment in self._pairs:
            return False
        trainer = self._table.claim(experiment, "train")  # clean: abandoned, or ended by end()
        if trainer is None:
            return False
        evaluator = self._table.claim(experiment, "eval")  # leak: end() completes only the trainer
        if evaluator is None:
            self._table.abandon(trainer)
            return False
        self._pairs[experiment] = (trainer, evaluator)
        return True

    def end(self, experiment: str) -> None:
        trainer, evaluator = self._pairs.pop(experiment)
        self._table.complete(trainer)
        log.info("%s ended, evaluator was %s", experiment, evaluator.job.job_id)
        self._finished.append(experiment)


def probe(table: LeaseTable, kind: str) -> bool:
    """Is there any job of this kind?"""
    return table.claim("probe", kind) is not None  # leak: the lease is only compared with None



def newest_of(table: LeaseTable, kinds: list[str]) -> Optional[Lease]:
    best: Optional[Lease] = None
    for kind in kinds:
        lease = table.claim("newest", kind)  # leak: a better candidate overwrites best, which stays leased
        if lease is None:
            continue
        if best is None or lease.job.payload.get("created", 0) > best.job.payload.get("created", 0):
            best = lease
        else:
            table.abandon(lease)
    return best


def oldest_of(table: LeaseTable, kinds: list[str]) -> Optional[Lease]:
    best: Optional[Lease] = None
    for kind in kinds:
        lease = table.claim("oldest", kind)  # clean: near miss, the loser of each comparison is abandoned
        if lease is None:
            continue
        if best is None:
            best = lease
        elif lease.job.payload.get("created", 0) < best.job.payload.get("created", 0):
            table.abandon(best)
            best = lease
        else:
            table.abandon(lease)
    return best
