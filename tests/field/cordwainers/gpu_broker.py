"""GPU broker of the training cluster: devices, memory fractions and gang jobs."""
from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

log = logging.getLogger("broker")


@dataclass(frozen=True)
class Grant:
    node: str
    index: int
    gib: float
    serial: int


class Node:
    def __init__(self, name: str, gpus: int, gib: float) -> None:
        self.name = name
        self._room = {i: gib for i in range(gpus)}
        self._serial = 0
        self._granted: dict[int, Grant] = {}

    def grant(self, gib: float) -> Grant | None:
        for index, room in sorted(self._room.items(), key=lambda kv: kv[1]):
            if room >= gib:
                self._room[index] -= gib
                self._serial += 1
                g = Grant(self.name, index, gib, self._serial)
                self._granted[g.serial] = g
                return g
        return None

    def revoke(self, g: Grant) -> None:
        del self._granted[g.serial]
        self._room[g.index] += g.gib


@dataclass
class Job:
    jid: str
    world: int
    gib: float
    grants: list[Grant] = field(default_factory=list)
    monitor: Grant | None = None
    attempts: int = 0


class Cluster:
    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = {n.name: n for n in nodes}
        self.mu = threading.RLock()

    def obtain(self, gib: float, prefer: str | None = None) -> Grant | None:
        with self.mu:
            if prefer in self.nodes:
                g = self.nodes[prefer].grant(gib)  # clean: handed to the caller
                if g is not None:
                    return g
            for node in self.nodes.values():
                g = node.grant(gib)  # clean: handed to the caller
                if g is not None:
                    return g
            return None

    def surrender(self, g: Grant | None) -> None:
        if g is None:
            return
        with self.mu:
            self.nodes[g.node].revoke(g)

    def obtain_near(self, other: Grant, gib: float) -> Grant | None:
        g = self.obtain(gib, prefer=other.node)  # leak: a grant on another node is refused and stays granted
        if g is not None and g.node != other.node:
            return None
        return g

    def obtain_wait(self, gib: float, seconds: float) -> Grant | None:
        end = time.monotonic() + seconds
        g = self.obtain(gib)  # clean: near miss, tried again only after None
        while g is None and time.monotonic() < end:
            time.sleep(0.5)
            g = self.obtain(gib)  # clean: near miss, the loop ends with the first grant, handed on
        return g


class Placement(ABC):
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.jobs: dict[str, Job] = {}

    @abstractmethod
    def place(self, job: Job) -> bool: ...

    def complete(self, jid: str) -> None:
        job = self.jobs.pop(jid, None)
        if job is None:
            return
        for g in job.grants:
            self.cluster.surrender(g)
        job.grants.clear()

    def kill_all(self) -> None:
        for jid in list(self.jobs):
            self.complete(jid)


class Gang(Placement):
    def place(self, job: Job) -> bool:
        got: list[Grant] = []
        for _ in range(job.world):
            g = self.cluster.obtain(job.gib)  # clean: all surrendered when the gang is not complete
            if g is None:
                for held in got:
                    self.cluster.surrender(held)
                return False
            got.append(g)
        job.grants = got
        self.jobs[job.jid] = job
        return True

    def restart(self, jid: str) -> bool:
        """After a crash: same job, other devices."""
        job = self.jobs[jid]
        job.attempts += 1
        if job.attempts > 3:
            self.complete(jid)
            return False
        fresh: list[Grant] = []
        for old in job.grants:
            g = self.cluster.obtain(job.gib)  # clean: replaces the old grant, or is surrendered when short
            if g is None:
                break
            fresh.append(g)
        if len(fresh) < len(job.grants):
            for g in fresh:
                self.cluster.surrender(g)
            return False
        for old in job.grants:
            self.cluster.surrender(old)
        job.grants = fresh
        return True


class Packed(Placement):
    """Keeps a job on one node."""

    def place(self, job: Job) -> bool:
        for node in self.cluster.nodes.values():
            got: list[Grant] = []
            for _ in range(job.world):
                g = node.grant(job.gib)  # leak: a node with too little room is left with its grants in got
                if g is None:
                    break
                got.append(g)
            if len(got) == job.world:
                job.grants = got
                self.jobs[job.jid] = job
                return True
        return False


class Elastic(Placement):
    def place(self, job: Job) -> bool:
        first = self.cluster.obtain(job.gib)  # clean: in job.grants, complete surrenders it
        if first is None:
            return False
        job.grants.append(first)
        self.jobs[job.jid] = job
        job.monitor = self.cluster.obtain(0.5, prefer=first.node)  # leak: complete does not end the monitor
        return True

    def grow(self, jid: str) -> bool:
        g = self.cluster.obtain(self.jobs[jid].gib)  # leak: the job at its full size returns with the grant
        job = self.jobs[jid]
        if g is None or len(job.grants) >= job.world:
            return False
        job.grants.append(g)
        return True

    def shrink(self, jid: str, to: int) -> int:
        job = self.jobs[jid]
        cut = job.grants[to:]
        del job.grants[to:]
        for g in cut:
            self.cluster.surrender(g)
        return len(cut)


class Reservation:
    """A grant that is kept for a user; used in a with statement or closed by hand."""

    def __init__(self, cluster: Cluster, gib: float) -> None:
        self.cluster = cluster
        self.g = cluster.obtain(gib)  # clean: close surrenders it, __exit__ calls close

    @property
    def ok(self) -> bool:
        return self.g is not None

    def detach(self) -> Grant | None:
        g, self.g = self.g, None
        return g

    def close(self) -> None:
        self.cluster.surrender(self.g)
        self.g = None

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def debug_shell(cluster: Cluster, gib: float) -> str:
    with Reservation(cluster, gib) as r:  # clean: context manager
        if not r.ok:
            return "no room"
        return f"CUDA_VISIBLE_DEVICES={r.g.index}"


def quick_probe(cluster: Cluster, gib: float) -> bool:
    r = Reservation(cluster, gib)  # leak: the reservation is asked and never closed
    return r.ok


def adopt(cluster: Cluster, job: Job) -> bool:
    r = Reservation(cluster, job.gib)  # clean: near miss, detached into the job's grants
    if not r.ok:
        return False
    job.grants.append(r.detach())  # clean: near miss, moved into the job
    return True


def ladder(cluster: Cluster, sizes: list[float]) -> Grant | None:
    """The largest size that fits."""
    for gib in sorted(sizes, reverse=True):
        g = cluster.obtain(gib)  # clean: near miss, the first that is not None is returned
        if g is not None:
            return g
    return None


def bench(cluster: Cluster, gib: float, seconds: float) -> float:
    g = cluster.obtain_wait(gib, seconds)  # leak: only the fast way surrenders it
    if g is None:
        return -1.0
    begin = time.perf_counter()
    time.sleep(0.01)
    took = time.perf_counter() - begin
    if took > 1.0:
        log.warning("node %s is slow: %.2f s", g.node, took)
        return took
    cluster.surrender(g)
    return took
