"""Routes requests to prefill and decode replicas by leased capacity."""
from __future__ import annotations

import heapq
import logging
import threading
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Set, Tuple

logger = logging.getLogger(__name__)


@dataclass(order=True)
class Lease:
    weight: int
    replica: str = field(compare=False)
    role: str = field(compare=False)
    holders: int = field(compare=False, default=1)


class ReplicaSet:
    """Capacity units of the replicas of one role."""

    def __init__(self, role: str, capacity: Dict[str, int]) -> None:
        self.role = role
        self.capacity = capacity
        self.load: Dict[str, int] = {name: 0 for name in capacity}
        self._mu = threading.Lock()

    def pick(self, weight: int, exclude: Optional[Set[str]] = None) -> Optional[Lease]:
        """Takes weight units of the least loaded replica with room."""
        with self._mu:
            names = [n for n in self.capacity if not exclude or n not in exclude]
            names = [n for n in names if self.load[n] + weight <= self.capacity[n]]
            if not names:
                return None
            best = min(names, key=lambda n: self.load[n] / self.capacity[n])
            self.load[best] += weight
            return Lease(weight, best, self.role)

    def retain(self, lease: Lease) -> Lease:
        with self._mu:
            lease.holders += 1
            return lease

    def unpick(self, lease: Lease) -> None:
        with self._mu:
            lease.holders -= 1
            if lease.holders == 0:
                self.load[lease.replica] -= lease.weight


class RouteLock:
    """Spin-free lock whose holder is named, for the routing table."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.holder = ""

    def enter(self, who: str) -> bool:
        if not self._lock.acquire(timeout=1.0):  # clean: handed on, leave() releases
            return False
        self.holder = who
        return True

    def leave(self) -> None:
        self.holder = ""
        self._lock.release()


class Router:
    def __init__(self, prefill: ReplicaSet, decode: ReplicaSet) -> None:
        self.prefill = prefill
        self.decode = decode
        self.lock = RouteLock()
        self.routes: Dict[str, Tuple[Lease, Lease]] = {}
        self.parked: List[Tuple[int, str, Lease]] = []
        self.mirrors: Dict[str, Lease] = {}

    def route(self, rid: str, prompt: int, output: int) -> bool:
        if rid in self.routes:
            return True
        first = self.prefill.pick(prompt)  # clean: unpicked without a decode replica, else kept in routes
        second = self.decode.pick(prompt + output)  # clean: unpicked without the other, or in routes
        match (first, second):
            case (None, None):
                return False
            case (None, Lease()):
                self.decode.unpick(second)
                return False
            case (Lease(), None):
                self.prefill.unpick(first)
                return False
        self.routes[rid] = (first, second)
        return True

    def unroute(self, rid: str) -> None:
        pair = self.routes.pop(rid, None)
        if pair is not None:
            self.prefill.unpick(pair[0])
            self.decode.unpick(pair[1])

    def kind_of_route(self, prompt: int, output: int) -> str:
        """What a request of this shape would get, without keeping it."""
        lease = self.prefill.pick(prompt)  # leak: a small decode replica answers "split" without an unpick
        if lease is None:
            return "queue"
        match self.decode.capacity.get(lease.replica):
            case None:
                self.prefill.unpick(lease)
                return "remote"
            case room if room >= prompt + output:
                self.prefill.unpick(lease)
                return "local"
            case _:
                return "split"

    def pick_healthy(self, weight: int, healthy: Callable[[str], bool]) -> Optional[Lease]:
        """First healthy decode replica."""
        tried: Set[str] = set()
        refused: List[Lease] = []
        found: Optional[Lease] = None
        while found is None:
            lease = self.decode.pick(weight, tried)  # clean: near miss, refused ones are unpicked below
            if lease is None:
                break
            if healthy(lease.replica):
                found = lease
            else:
                tried.add(lease.replica)
                refused.append(lease)
        for lease in refused:
            self.decode.unpick(lease)
        return found

    def ping(self, healthy: Callable[[str], bool]) -> str:
        lease = self.pick_healthy(1, healthy)  # leak: the name is read out, the capacity stays taken
        return lease.replica if lease is not None else ""

    # -- parking -------------------------------------------------------

    def park(self, rid: str, priority: int, weight: int) -> bool:
        """Reserves decode capacity for a request that waits for its KV."""
        lease = self.decode.pick(weight)  # leak: unpark() drops the lease of a cancelled request
        if lease is None:
            return False
        heapq.heappush(self.parked, (priority, rid, lease))
        return True

    def unpark(self, cancelled: Set[str], start: Callable[[str, str], None]) -> int:
        started = 0
        while self.parked:
            _, rid, lease = heapq.heappop(self.parked)
            if rid in cancelled:
                cancelled.discard(rid)
                continue
            start(rid, lease.replica)
            started += 1
            self.decode.unpick(lease)
        return started

    # -- mirrors -------------------------------------------------------

    def mirror(self, rid: str, copies: List[str]) -> int:
        """All copies of a request share the decode lease of its route."""
        pair = self.routes.get(rid)
        if pair is None:
            return 0
        added = 0
        for copy in copies:
            if copy in self.mirrors:
                continue
            self.mirrors[copy] = self.decode.retain(pair[1])  # clean: near miss, unmirror() unpicks each
            added += 1
        return added

    def unmirror(self, copy: str) -> None:
        lease = self.mirrors.pop(copy, None)
        if lease is not None:
            self.decode.unpick(lease)

    def compare(self, rid: str, runs: List[Callable[[str], float]]) -> float:
        """Spread of several runs on the decode replica of a route."""
        pair = self.routes.get(rid)
        if pair is None or not runs:
            return 0.0
        values: List[float] = []
        for run in runs:
            lease = self.decode.retain(pair[1])  # leak: retained once per run, unpicked once after the loop
            values.append(run(lease.replica))
        self.decode.unpick(pair[1])
        return max(values) - min(values)

    # -- table ---------------------------------------------------------

    def rebalance(self, who: str, limit: int) -> int:
        if not self.lock.enter(who):  # leak: an empty table returns before leave()
            return 0
        if not self.routes:
            return 0
        moved = 0
        for rid, (first, second) in list(self.routes.items()):
            if moved == limit:
                break
            if self.decode.load[second.replica] * 2 < self.decode.capacity[second.replica]:
                continue
            other = self.decode.pick(second.weight, {second.replica})  # clean: swapped into routes
            if other is None:
                continue
            self.routes[rid] = (first, other)
            self.decode.unpick(second)
            moved += 1
        self.lock.leave()
        return moved

    def snapshot(self, who: str) -> Dict[str, str]:
        entered = self.lock.enter(who)  # clean: near miss, left under the same flag
        table = {rid: pair[1].replica for rid, pair in self.routes.items()}
        if entered:
            self.lock.leave()
        return table
