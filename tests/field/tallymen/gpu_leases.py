"""Leases of GPUs and ports for training jobs, services and notebooks."""
import enum
import itertools
import logging
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Dict, List, Optional

log = logging.getLogger("leases")


class NotEnough(Exception): pass
class NoPort(Exception): pass
class SpawnError(Exception): pass


class JobState(enum.Enum):
    PENDING = "pending"
    RUNNING = "running"
    FAILED = "failed"
    DONE = "done"


@dataclass
class Host:
    name: str
    free: List[int]
    last_seen: float = 0.0

    def reachable(self) -> bool:
        return time.time() - self.last_seen < 30


@dataclass(eq=False)
class Lease:
    number: int
    host: Host
    gpus: List[int]
    alive: bool = True
    beat: float = field(default_factory=time.time)


class Cluster:
    def __init__(self, hosts: List[Host]):
        self.hosts = hosts
        self._mu = threading.RLock()
        self._numbers = itertools.count(1)

    def lease(self, host: Host, n: int) -> Lease:
        with self._mu:
            if len(host.free) < n:
                raise NotEnough(f"{host.name}: {len(host.free)} of {n}")
            gpus = [host.free.pop() for _ in range(n)]  # clean: go into the lease
            return Lease(next(self._numbers), host, gpus)

    def lease_any(self, n: int) -> Lease:
        for host in sorted(self.hosts, key=lambda h: len(h.free)):
            try:
                return self.lease(host, n)  # clean: returned
            except NotEnough:
                continue
        raise NotEnough(f"{n} on any host")

    def surrender(self, lease: Lease) -> None:
        with self._mu:
            if lease.alive:
                lease.alive = False
                lease.host.free.extend(lease.gpus)
                lease.gpus = []

    def renew(self, lease: Lease) -> Lease:
        """A new lease with the same GPUs; the old one is void."""
        with self._mu:
            fresh = Lease(next(self._numbers), lease.host, lease.gpus)
            lease.alive = False
            lease.gpus = []
            return fresh

    def gang(self, hosts: int, per_host: int) -> Optional[List[Lease]]:
        got: List[Lease] = []
        for host in self.hosts:
            try:
                lease = self.lease(host, per_host)  # leak: the lease on a host that cannot be reached is skipped, not surrendered
            except NotEnough:
                continue
            if not host.reachable():
                log.warning("%s does not answer", host.name)
                continue
            got.append(lease)
            if len(got) == hosts:
                return got
        for lease in got:
            self.surrender(lease)
        return None


class PortRange:
    def __init__(self, lo: int, hi: int):
        self._free = deque(range(lo, hi))

    def take(self) -> int:
        while self._free:
            port = self._free.popleft()  # leak: a port that another program has at the moment is never offered again
            with socket.socket() as s:  # clean: closed with the block
                if s.connect_ex(("127.0.0.1", port)) == 0:
                    log.info("port %d is busy", port)
                    continue
            return port
        raise NoPort()

    def give(self, port: int) -> None:
        self._free.append(port)


@dataclass(eq=False)
class Job:
    name: str
    hosts: int
    per_host: int
    state: JobState = JobState.PENDING
    leases: List[Lease] = field(default_factory=list)
    port: Optional[int] = None
    failures: int = 0

    def start(self, leases: List[Lease], ports: PortRange, launcher) -> bool:
        port = ports.take()  # leak: SpawnError is handled and the port not given back
        try:
            for rank, lease in enumerate(leases):
                launcher.spawn(self.name, rank, lease.host.name, lease.gpus, port)
        except SpawnError as exc:
            log.error("%s: %s", self.name, exc)
            self.failures += 1
            self.state = JobState.FAILED
            return False
        self.leases = leases
        self.port = port
        self.state = JobState.RUNNING
        return True

    def finish(self, cluster: Cluster, ports: PortRange) -> None:
        for lease in self.leases:
            cluster.surrender(lease)
        self.leases = []
        if self.port is not None:
            ports.give(self.port)
            self.port = None
        self.state = JobState.DONE

    def requeue(self, ports: PortRange) -> None:
        self.state = JobState.PENDING
        self.failures += 1
        if self.port is not None:
            ports.give(self.port)
            self.port = None
        self.leases = []


class JobScheduler:
    def __init__(self, cluster: Cluster, ports: PortRange, launcher):
        self.cluster = cluster
        self.ports = ports
        self.launcher = launcher
        self.jobs: List[Job] = []

    def tick(self) -> None:
        for job in self.jobs:
            if job.state is not JobState.PENDING or job.failures > 3:
                continue
            leases = self.cluster.gang(job.hosts, job.per_host)  # leak: requeue() empties the job's list without surrendering
            if leases is None:
                continue
            started = False
            try:
                started = job.start(leases, self.ports, self.launcher)
            except NoPort:
                log.warning("no port for %s", job.name)
            finally:
                if not started:
                    for lease in leases:
                        self.cluster.surrender(lease)

    def on_exit(self, job: Job, code: int) -> None:
        if code == 0:
            job.finish(self.cluster, self.ports)
        else:
            job.requeue(self.ports)


class Service:
    """Replicas with one GPU each."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.replicas: List[Lease] = []

    def scale_to(self, n: int) -> int:
        while len(self.replicas) > n:
            self.cluster.surrender(self.replicas.pop())
        try:
            while len(self.replicas) < n:
                self.replicas.append(self.cluster.lease_any(1))  # clean: near miss, the handled NotEnough leaves the others in the list
        except NotEnough:
            log.info("scaled to %d only", len(self.replicas))
        return len(self.replicas)

    def roll(self) -> None:
        for i, old in enumerate(self.replicas):
            self.replicas[i] = self.cluster.lease_any(1)  # clean: near miss, the overwritten one is surrendered next
            self.cluster.surrender(old)


class Notebooks:
    def __init__(self, cluster: Cluster, idle: float = 1800):
        self.cluster = cluster
        self.idle = idle
        self._by_user: Dict[str, Lease] = {}

    def ensure(self, user: str) -> bool:
        lease = self._by_user.get(user)
        if lease is not None and lease.alive:
            lease.beat = time.time()
            return True
        try:
            self._by_user[user] = self.cluster.lease_any(1)  # clean: near miss, overwrites only a lease that was surrendered
        except NotEnough:
            return False
        return True

    def expire(self) -> None:
        for lease in self._by_user.values():
            if lease.alive and time.time() - lease.beat > self.idle:
                self.cluster.surrender(lease)


def compare_hosts(cluster: Cluster, bench) -> Optional[float]:
    try:
        a = cluster.lease_any(1)  # leak: NotEnough for the second one is handled with this one held
        b = cluster.lease_any(1)  # clean: surrendered in the finally
    except NotEnough:
        return None
    try:
        return bench(a.host, a.gpus) / bench(b.host, b.gpus)
    finally:
        cluster.surrender(a)
        cluster.surrender(b)


def long_run(cluster: Cluster, steps, every: int = 100) -> None:
    lease = cluster.lease_any(8)  # clean: near miss, renew() voids the old one, the last one is surrendered
    try:
        for i, step in enumerate(steps):
            step(lease.gpus)
            if i % every == 0:
                lease = cluster.renew(lease)  # clean: the same GPUs, surrendered in the finally
    finally:
        cluster.surrender(lease)
