"""Ranks and the seats of a rendezvous round."""
import heapq
import logging
import threading
from dataclasses import dataclass, field

from .store import KeyTaken, StoreClosed

log = logging.getLogger(__name__)


class RoundFull(Exception):
    pass


class RankTable:
    def __init__(self, world):
        self.world = world
        self._vacant = list(range(world))
        self._lock = threading.Lock()

    def assign(self):
        with self._lock:
            return heapq.heappop(self._vacant) if self._vacant else None  # clean: the rank goes to the caller

    def assign_block(self, n):
        """n consecutive ranks for a host with n devices, or None."""
        with self._lock:
            run = []
            rest = []
            while self._vacant and len(run) < n:
                r = heapq.heappop(self._vacant)  # leak: ranks of a run that was broken off are in rest, which the return of a full run drops
                if run and r != run[-1] + 1:
                    rest += run
                    run = []
                run.append(r)
            if len(run) == n:
                return run
            for r in rest + run:
                heapq.heappush(self._vacant, r)
            return None

    def vacate(self, rank):
        with self._lock:
            heapq.heappush(self._vacant, rank)


@dataclass
class Member:
    host: str
    ranks: list
    lease: object
    meta: dict = field(default_factory=dict)


class Rendezvous:
    def __init__(self, store, table, ttl=30.0):
        self.store, self.table, self.ttl = store, table, ttl
        self.members = {}
        self.spares = []
        self._lock = threading.RLock()
        self.round = 0

    def join(self, host, devices):
        lease = self.store.grant(self.ttl)  # clean: near miss, revoked on both refusals, else owned by the member until leave() or close()
        ranks = self.table.assign_block(devices)  # leak: a host whose key is taken is refused, its lease is revoked but its ranks stay assigned
        if ranks is None:
            lease.revoke()
            raise RoundFull(host)
        try:
            self.store.put_new(f"round/{self.round}/{host}", ranks, lease)
        except KeyTaken:
            lease.revoke()
            return None
        return self._install(Member(host, ranks, lease))

    def _install(self, member):
        with self._lock:
            stale = self.members.pop(member.host, None)
            self.members[member.host] = member
        if stale is not None:
            self._dissolve(stale)
        return member

    def join_spare(self, host):
        try:
            lease = self.store.grant(self.ttl * 10)  # leak: promote() takes the spare out of the list before it knows whether there is a rank
        except StoreClosed:
            return False
        with self._lock:
            self.spares.append((host, lease))
        return True

    def promote(self):
        """A spare takes a free rank; its lease moves to the member."""
        with self._lock:
            if not self.spares:
                return None
            host, lease = self.spares.pop(0)
            rank = self.table.assign()  # clean: near miss, owned by the member, and None holds nothing
            if rank is None:
                log.info("%s stays without a rank", host)
                return None
        return self._install(Member(host, [rank], lease, {"promoted": True}))

    def _dissolve(self, member):
        for rank in member.ranks:
            self.table.vacate(rank)
        member.lease.revoke()

    def leave(self, host):
        with self._lock:
            member = self.members.pop(host, None)
        if member is not None:
            self._dissolve(member)

    def close(self):
        for host in list(self.members):
            self.leave(host)
        with self._lock:
            for _, lease in self.spares:
                lease.revoke()
            self.spares.clear()
