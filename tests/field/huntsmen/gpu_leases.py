"""GPU ledger and job scheduler of a small training cluster.

The ledger knows which GPUs of which node are free and issues leases.  The scheduler
turns queued jobs into processes.  Everything runs in one scheduling thread, plus the
threads that wait for processes and call back.
"""
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

PREEMPTED = 75


class LaunchError(Exception):
    """The node refused the process."""


class State(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass
class Node:
    name: str
    total: int
    free: set[int] = field(default_factory=set)
    cordoned: bool = False

    def __post_init__(self) -> None:
        self.free = set(range(self.total))


@dataclass(frozen=True)
class Lease:
    lease_id: int
    gpus: tuple[tuple[str, int], ...]
    issued: float = field(default_factory=time.time)

    def __len__(self) -> int:
        return len(self.gpus)

    @property
    def node(self) -> str:
        return self.gpus[0][0]


@dataclass(order=True)
class Job:
    priority: int
    seq: int
    name: str = field(compare=False)
    gpus: int = field(compare=False, default=1)
    gangs: list[int] = field(compare=False, default_factory=list)
    est_seconds: float = field(compare=False, default=3600.0)
    state: State = field(compare=False, default=State.QUEUED)
    leases: list[Lease] = field(compare=False, default_factory=list)
    proc: Optional[object] = field(compare=False, default=None)


class Ledger:
    def __init__(self, nodes: list[Node]):
        self.nodes = {n.name: n for n in nodes}
        self._lock = threading.RLock()
        self._ids = itertools.count(1)
        self.outstanding: dict[int, Lease] = {}

    def _issue(self, gpus: list[tuple[str, int]]) -> Lease:
        lease = Lease(next(self._ids), tuple(gpus))
        self.outstanding[lease.lease_id] = lease
        return lease

    def reserve(self, want: int, node: str | None = None) -> Lease | None:
        with self._lock:
            for nd in self.nodes.values():
                if nd.cordoned or (node and nd.name != node) or len(nd.free) < want:
                    continue
                gpus = [(nd.name, nd.free.pop()) for _ in range(want)]  # clean: recorded in the lease that is returned
                return self._issue(gpus)  # clean: handed to the caller
        return None

    def reserve_spread(self, want: int) -> Lease | None:
        """One GPU on each of `want` nodes, for bandwidth tests and parameter servers."""
        picked: list[tuple[str, int]] = []
        with self._lock:
            for nd in self.nodes.values():
                if len(picked) == want:
                    break
                if nd.free and not nd.cordoned:
                    picked.append((nd.name, nd.free.pop()))  # leak: if there are fewer nodes than wanted the picked GPUs do not go back
            if len(picked) < want:
                log.info("spread of %d: only %d nodes have room", want, len(picked))
                return None
            return self._issue(picked)  # clean: handed to the caller

    def release(self, lease: Lease) -> None:
        with self._lock:
            if self.outstanding.pop(lease.lease_id, None) is None:
                log.warning("lease %d is not outstanding", lease.lease_id)
                return
            for name, gpu in lease.gpus:
                self.nodes[name].free.add(gpu)

    def merge(self, a: Lease, b: Lease) -> Lease:
        """One lease in the place of two."""
        with self._lock:
            del self.outstanding[a.lease_id], self.outstanding[b.lease_id]
            return self._issue([*a.gpus, *b.gpus])  # clean: handed to the caller, the two old ones are struck out

    def wait_for(self, want: int, poll: float = 2.0) -> Lease:
        while (lease := self.reserve(want)) is None:  # clean: handed to the caller when it is not None
            time.sleep(poll)
        return lease


@dataclass
class EvalRun:
    """A short evaluation beside the queue; owns its lease."""
    ledger: Ledger
    lease: Lease
    model: str
    proc: Optional[object] = None

    def launch(self, spawn: Callable) -> None:
        self.proc = spawn(["eval", self.model], self.lease.gpus)

    def close(self) -> None:
        if self.proc is None:
            return
        self.proc.terminate()
        self.proc = None
        self.ledger.release(self.lease)


class Scheduler:
    def __init__(self, ledger: Ledger, spawn: Callable, known_models: set[str]):
        self.ledger = ledger
        self.spawn = spawn
        self.known_models = known_models
        self.queue: list[Job] = []
        self.running: dict[int, Job] = {}
        self.maintenance: dict[str, Lease] = {}

    def submit(self, job: Job) -> None:
        heapq.heappush(self.queue, job)

    def tick(self) -> int:
        started, blocked = 0, []
        while self.queue:
            job = heapq.heappop(self.queue)
            ok = self._start_gang(job) if job.gangs else self._start(job)
            if ok:
                started += 1
            elif job.state is State.QUEUED:
                blocked.append(job)
                break
        for job in blocked:
            heapq.heappush(self.queue, job)
        return started

    def _start(self, job: Job) -> bool:
        lease = self.ledger.reserve(job.gpus)  # leak: a LaunchError marks the job failed and drops the lease
        if lease is None:
            return False
        try:
            job.proc = self.spawn(["train", job.name], lease.gpus)
        except LaunchError as exc:
            log.error("%s: %s", job.name, exc)
            job.state = State.FAILED
            return False
        job.leases = [lease]
        self._running(job)
        return True

    def _start_gang(self, job: Job) -> bool:
        leases: list[Lease] = []
        for want in job.gangs:
            lease = self.ledger.reserve(want)  # clean: near miss, if a later part finds no room the earlier ones are released
            if lease is None:
                for other in leases:
                    self.ledger.release(other)
                return False
            leases.append(lease)
        job.leases = leases
        try:
            job.proc = self.spawn(["train", job.name], [g for l in leases for g in l.gpus])
        except LaunchError as exc:
            log.error("%s: %s", job.name, exc)
            self._let_go(job)
            job.state = State.FAILED
            return False
        self._running(job)
        return True

    def _running(self, job: Job) -> None:
        job.state = State.RUNNING
        self.running[job.seq] = job

    def _let_go(self, job: Job) -> None:
        while job.leases:
            self.ledger.release(job.leases.pop())

    def on_exit(self, seq: int, code: int) -> None:
        job = self.running.pop(seq)
        job.proc = None
        self._let_go(job)
        if code == PREEMPTED:
            job.state = State.QUEUED
            self.submit(job)
        else:
            job.state = State.DONE if code == 0 else State.FAILED

    def grow(self, seq: int, gpus: int) -> bool:
        job = self.running[seq]
        old = job.leases[0]
        extra = self.ledger.reserve(gpus - len(old), node=old.node)  # clean: near miss, merged into the lease that the job holds
        if extra is None:
            return False
        job.leases[0] = self.ledger.merge(old, extra)  # clean: near miss, replaces the old one in the job, on_exit() releases it
        return True

    def drain_node(self, name: str) -> bool:
        node = self.ledger.nodes[name]
        lease = self.ledger.reserve(len(node.free), node=name)  # leak: draining a node again overwrites the entry with the later lease
        if lease is None:
            return False
        self.maintenance[name] = lease
        return True

    def undrain_node(self, name: str) -> None:
        lease = self.maintenance.pop(name, None)
        if lease is not None:
            self.ledger.release(lease)

    def probe(self, healthy: Callable[[str, int], bool]) -> list[str]:
        bad = []
        for name, node in self.ledger.nodes.items():
            lease = self.ledger.reserve(1, node=name)  # leak: for an unhealthy GPU the loop continues before the release
            if lease is None:
                continue
            if not healthy(*lease.gpus[0]):
                node.cordoned = True
                bad.append(name)
                continue
            self.ledger.release(lease)
        return bad

    def evaluate(self, model: str) -> int:
        lease = self.ledger.wait_for(1)  # leak: an unknown model is closed before its launch, and close() then releases nothing
        run = EvalRun(self.ledger, lease, model)
        try:
            if model not in self.known_models:
                log.warning("no such model: %s", model)
                return -1
            run.launch(self.spawn)
            return run.proc.wait()
        finally:
            run.close()

    def bandwidth_test(self, width: int, measure: Callable) -> float | None:
        lease = self.ledger.reserve_spread(width)  # clean: near miss, None returns early and the finally releases the rest
        if lease is None:
            return None
        try:
            return measure(lease.gpus)
        finally:
            self.ledger.release(lease)
