from __future__ import annotations

import heapq
import itertools
import logging
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Callable, Optional

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GpuLease:
    node: str
    gpus: tuple[int, ...]


class Node:
    def __init__(self, name: str, num_gpus: int) -> None:
        self.name = name
        self._free = set(range(num_gpus))
        self.healthy = True

    def reserve(self, n: int) -> Optional[GpuLease]:
        if len(self._free) < n:
            return None
        picked = tuple(sorted(self._free)[:n])
        self._free.difference_update(picked)
        return GpuLease(self.name, picked)

    def cancel(self, lease: GpuLease) -> None:
        self._free.update(lease.gpus)


class PortRange:
    def __init__(self, low: int, high: int) -> None:
        self._free = list(range(low, high))

    def claim(self) -> int:
        return self._free.pop()

    def unclaim(self, port: int) -> None:
        self._free.append(port)

    def __len__(self) -> int:
        return len(self._free)


class Quota:
    def __init__(self, limits: dict[str, int]) -> None:
        self.limits = limits
        self.used: dict[str, int] = {}

    def charge(self, team: str, gpus: int) -> bool:
        if self.used.get(team, 0) + gpus > self.limits.get(team, 0):
            return False
        self.used[team] = self.used.get(team, 0) + gpus
        return True

    def refund(self, team: str, gpus: int) -> None:
        self.used[team] -= gpus


@dataclass(eq=False)
class Job:
    name: str
    team: str
    nodes: int
    gpus_per_node: int
    priority: int = 0
    leases: list[GpuLease] = field(default_factory=list)
    port: Optional[int] = None
    state: str = "pending"

    @property
    def total_gpus(self) -> int:
        return self.nodes * self.gpus_per_node


class Scheduler:
    def __init__(self, nodes: dict[str, Node], ports: PortRange, quota: Quota) -> None:
        self.nodes = nodes
        self.ports = ports
        self.quota = quota
        self._seq = itertools.count()
        self._heap: list[tuple[int, int, Job]] = []
        self.running: dict[str, Job] = {}
        self.maintenance: dict[str, GpuLease] = {}

    def submit(self, job: Job) -> None:
        heapq.heappush(self._heap, (-job.priority, next(self._seq), job))

    def _gang_reserve(self, job: Job) -> Optional[list[GpuLease]]:
        leases: list[GpuLease] = []
        for node in self.nodes.values():
            if len(leases) == job.nodes:
                break
            lease = node.reserve(job.gpus_per_node)  # clean: near miss, all collected leases are cancelled when the gang is short
            if lease is None:
                continue
            leases.append(lease)
        if len(leases) < job.nodes:
            for lease in leases:
                self.nodes[lease.node].cancel(lease)
            return None
        return leases

    def try_start(self, job: Job) -> bool:
        if not self.quota.charge(job.team, job.total_gpus):  # leak: not refunded when the gang cannot be placed
            return False
        leases = self._gang_reserve(job)  # clean: near miss, kept by the job, _teardown cancels them
        if leases is None:
            return False
        job.leases = leases
        job.port = self.ports.claim()  # leak: preempt() clears the job's port without unclaim
        job.state = "running"
        self.running[job.name] = job
        return True

    def schedule(self) -> int:
        started = 0
        deferred: list[tuple[int, int, Job]] = []
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self.try_start(entry[2]):
                started += 1
                continue
            deferred.append(entry)
        for entry in deferred:
            heapq.heappush(self._heap, entry)
        return started

    def _teardown(self, job: Job) -> None:
        for lease in job.leases:
            self.nodes[lease.node].cancel(lease)
        job.leases = []
        self.quota.refund(job.team, job.total_gpus)

    def finish(self, name: str) -> None:
        job = self.running.pop(name)
        self._teardown(job)
        if job.port is not None:
            self.ports.unclaim(job.port)
            job.port = None
        job.state = "done"

    def preempt(self, name: str) -> None:
        job = self.running.pop(name)
        self._teardown(job)
        job.port = None
        job.state = "pending"
        self.submit(job)

    def resize(self, job: Job, extra: int) -> bool:
        if not self.quota.charge(job.team, extra * job.gpus_per_node):  # clean: near miss, refunded for the nodes that were not found
            return False
        added = 0
        for node in self.nodes.values():
            if added == extra:
                break
            lease = node.reserve(job.gpus_per_node)  # leak: a lease on an unhealthy node is skipped without cancel
            if lease is None:
                continue
            if not node.healthy:
                logger.warning("node %s is not healthy", node.name)
                continue
            job.leases.append(lease)
            added += 1
        job.nodes += added
        if added < extra:
            self.quota.refund(job.team, (extra - added) * job.gpus_per_node)
        return added == extra

    def run_inline(self, job: Job, body: Callable[[list[GpuLease], int], int]) -> int:
        with ExitStack() as stack:
            leases = self._gang_reserve(job)  # clean: near miss, None returns with nothing held, the stack cancels the rest
            if leases is None:
                return -1
            for lease in leases:
                stack.callback(self.nodes[lease.node].cancel, lease)
            port = self.ports.claim()  # clean: near miss, the stack's callback unclaims it on all returns
            stack.callback(self.ports.unclaim, port)
            if job.state == "cancelled":
                return 1
            return body(leases, port)

    def drain_node(self, name: str) -> bool:
        node = self.nodes[name]
        if name in self.maintenance:
            return True
        lease = node.reserve(len(node._free))  # clean: near miss, kept in maintenance until undrain
        if lease is None:
            return False
        node.healthy = False
        self.maintenance[name] = lease
        return True

    def undrain(self, name: str) -> None:
        lease = self.maintenance.pop(name, None)
        if lease is not None:
            self.nodes[name].cancel(lease)
            self.nodes[name].healthy = True

    def port_pair(self, avoid: set[int]) -> Optional[tuple[int, int]]:
        main = self.ports.claim()  # clean: near miss, unclaimed on refusal, else handed to the caller
        if main in avoid or not len(self.ports):
            self.ports.unclaim(main)
            return None
        side = self.ports.claim()  # leak: only main is unclaimed when side is to be avoided
        if side in avoid:
            self.ports.unclaim(main)
            return None
        return main, side

    def release_pair(self, pair: tuple[int, int]) -> None:
        for port in pair:
            self.ports.unclaim(port)
