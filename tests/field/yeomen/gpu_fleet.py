"""Autoscaler for model replicas on leased GPU nodes.

A replica of a model with tensor parallel size N runs on N GPUs of one node, one
with pipeline parallelism on several nodes.  Nodes are leased from a provider
and paid for by the minute until they are surrendered.
"""
from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Callable, Dict, List, Optional

LOG = logging.getLogger("fleet")


class QuotaExceeded(Exception):
    """The account has no more nodes of the kind."""


class BootFailure(Exception):
    """A node came up without working GPUs."""


class Phase(Enum):
    BOOTING = auto()
    SERVING = auto()
    DRAINING = auto()
    GONE = auto()


@dataclass
class NodeLease:
    node_id: str
    kind: str
    started: float
    price: float
    surrendered: bool = False


class Provider:
    """In-memory view of the cloud account."""

    def __init__(self, api, quota: Dict[str, int]):
        self._api = api
        self._quota = dict(quota)
        self._spend = 0.0

    def lease(self, kind: str) -> NodeLease:
        if self._quota.get(kind, 0) <= 0:
            raise QuotaExceeded(kind)
        self._quota[kind] -= 1
        reply = self._api.create_node(kind)  # clean: the node goes into the lease that is returned
        return NodeLease(reply["id"], kind, time.time(), reply["price"])

    def surrender(self, lease: NodeLease) -> None:
        if lease.surrendered:
            LOG.warning("%s surrendered twice", lease.node_id)
            return
        lease.surrendered = True
        self._spend += (time.time() - lease.started) / 60 * lease.price
        self._api.delete_node(lease.node_id)
        self._quota[lease.kind] += 1

    def alive(self, lease: NodeLease) -> bool:
        return self._api.ping(lease.node_id)


@dataclass
class Replica:
    name: str
    model: str
    leases: List[NodeLease]
    phase: Phase = Phase.BOOTING
    draining: bool = False
    inflight: int = 0
    born: float = field(default_factory=time.time)

    @property
    def head(self) -> NodeLease:
        return self.leases[0]

    def teardown(self, provider: Provider) -> None:
        while self.leases:
            provider.surrender(self.leases.pop())
        self.phase = Phase.GONE


@dataclass
class ModelSpec:
    model: str
    kind: str
    nodes: int = 1
    floor: int = 1
    ceiling: int = 8
    per_replica: int = 32


class Fleet:
    def __init__(self, provider: Provider, specs: List[ModelSpec], boot_timeout: float = 600):
        self.provider = provider
        self.specs = {s.model: s for s in specs}
        self.boot_timeout = boot_timeout
        self.replicas: Dict[str, Replica] = {}
        self.spares: List[NodeLease] = []
        self._serial = 0

    # ---- making replicas

    def _wait_boot(self, lease: NodeLease) -> bool:
        until = time.time() + self.boot_timeout
        while time.time() < until:
            if self.provider.alive(lease):
                return True
            time.sleep(5)
        return False

    def _gang(self, spec: ModelSpec) -> Optional[List[NodeLease]]:
        """All the nodes of one replica, or none."""
        leases: List[NodeLease] = []
        for _ in range(spec.nodes):
            try:
                leases.append(self.provider.lease(spec.kind))  # clean: near miss, a gang that is not complete is surrendered
            except QuotaExceeded:
                LOG.info("%s: %d of %d nodes", spec.model, len(leases), spec.nodes)
                for lease in leases:
                    self.provider.surrender(lease)
                return None
        return leases

    def _single(self, spec: ModelSpec) -> Optional[List[NodeLease]]:
        for i, spare in enumerate(self.spares):
            if spare.kind == spec.kind:
                return [self.spares.pop(i)]  # clean: a spare turns into the node of a replica
        try:
            lease = self.provider.lease(spec.kind)  # leak: a node that does not boot in time is reported and left running
        except QuotaExceeded:
            return None
        if not self._wait_boot(lease):
            LOG.error("%s did not boot", lease.node_id)
            return None
        return [lease]

    def _spawn(self, spec: ModelSpec) -> Optional[Replica]:
        leases = self._gang(spec) if spec.nodes > 1 else None  # clean: ends in a replica, and teardown surrenders all of them
        if leases is None and spec.nodes == 1:
            leases = self._single(spec)  # clean: ends in a replica, too
        if leases is None:
            return None
        self._serial += 1
        replica = Replica(f"{spec.model}-{self._serial}", spec.model, leases)
        self.replicas[replica.name] = replica
        return replica

    def add_spares(self, kind: str, n: int) -> None:
        for _ in range(n):
            try:
                lease = self.provider.lease(kind)  # leak: a BootFailure of the check is caught when the lease is in no list yet
                self._check_gpus(lease)
                self.spares.append(lease)
            except QuotaExceeded:
                return
            except BootFailure as exc:
                LOG.warning("no spare: %s", exc)

    def _check_gpus(self, lease: NodeLease) -> None:
        if not self._wait_boot(lease) or lease.price > 120:
            raise BootFailure(lease.node_id)

    def drop_spares(self) -> None:
        for lease in self.spares:
            self.provider.surrender(lease)
        self.spares.clear()

    # ---- keeping them

    def refresh_head(self, replica: Replica) -> bool:
        """Moves a replica with a flaky head to a new node."""
        spec = self.specs[replica.model]
        try:
            fresh = self.provider.lease(spec.kind)  # clean: near miss, put in the place of the old head, which is surrendered
        except QuotaExceeded:
            return False
        old = replica.head
        replica.leases[0] = fresh
        self.provider.surrender(old)
        return True

    def upgrade(self, replica: Replica, kind: str) -> bool:
        """Swaps every node of a replica for one of a better kind."""
        better: List[NodeLease] = []
        try:
            for _ in replica.leases:
                better.append(self.provider.lease(kind))  # leak: the nodes leased so far are in a local list when the quota ends
        except QuotaExceeded:
            return False
        outgoing, replica.leases = replica.leases, better
        for lease in outgoing:
            self.provider.surrender(lease)
        return True

    def add_stage(self, replica: Replica) -> None:
        """One more pipeline stage."""
        lease = self.provider.lease(self.specs[replica.model].kind)  # clean: near miss, joins the replica or is surrendered
        if replica.phase is Phase.SERVING and self._wait_boot(lease):
            replica.leases.append(lease)
        else:
            self.provider.surrender(lease)

    def drain(self, replica: Replica) -> None:
        replica.draining = True

    def reap(self) -> None:
        for name, replica in list(self.replicas.items()):
            if replica.phase is Phase.DRAINING or replica.draining:
                if replica.inflight == 0:
                    replica.teardown(self.provider)
                    del self.replicas[name]

    def scale(self, load: Dict[str, int]) -> None:
        for model, spec in self.specs.items():
            want = math.ceil(load.get(model, 0) / spec.per_replica)
            want = min(max(want, spec.floor), spec.ceiling)
            mine = [r for r in self.replicas.values() if r.model == model and not r.draining]
            for _ in range(want - len(mine)):
                if self._spawn(spec) is None:
                    break
            for replica in sorted(mine, key=lambda r: r.inflight)[: max(0, len(mine) - want)]:
                self.drain(replica)
        self.reap()

    # ---- experiments

    def canary(self, spec: ModelSpec, probe: Callable[[NodeLease], float]) -> Optional[float]:
        lease = self.provider.lease(spec.kind)  # leak: the surrender asks for a phase that the canary has left when it is slow
        canary = Replica("canary", spec.model, [lease])
        latency = None
        if self._wait_boot(lease):
            canary.phase = Phase.SERVING
            latency = probe(lease)
            if latency > 1.0:
                canary.phase = Phase.DRAINING
        if canary.phase in (Phase.SERVING, Phase.BOOTING):
            canary.teardown(self.provider)
        return latency

    def burst(self, spec: ModelSpec, job: Callable[[NodeLease], None], n: int) -> int:
        """Runs an offline job on n nodes in turn."""
        rented: Dict[str, NodeLease] = {}
        ran = 0
        for i in range(n):
            lease = self.provider.lease(spec.kind)  # leak: the key is the kind, so each node overwrites the one before
            rented[lease.kind] = lease
            job(lease)
            ran += 1
        for lease in rented.values():
            self.provider.surrender(lease)
        return ran
