"""Elastic training: rank slots, ports and key leases that the agents of a job hold in a coordinator."""
from __future__ import annotations

import logging
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Iterator, Optional, Protocol

log = logging.getLogger("rdzv")


class Leasable(Protocol):
    def revoke(self) -> None: ...


class PortRange:
    def __init__(self, low: int, high: int) -> None:
        self._free = list(range(low, high))
        self._lock = threading.Lock()

    def take_port(self) -> Optional[int]:
        with self._lock:
            return self._free.pop() if self._free else None

    def put_port(self, port: int) -> None:
        with self._lock:
            self._free.append(port)

    def take_bindable(self, tries: int = 5) -> Optional[int]:
        """A port that nobody else on this host listens on."""
        for _ in range(tries):
            port = self.take_port()  # leak: a port that is in use elsewhere is dropped, the next one is tried
            if port is None:
                return None
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", port)) != 0:
                    return port
        return None


class RankTable:
    def __init__(self, world: int) -> None:
        self._owner: list[Optional[str]] = [None] * world
        self._lock = threading.RLock()

    def join(self, host: str) -> Optional["RankLease"]:
        with self._lock:
            for rank, owner in enumerate(self._owner):
                if owner is None:
                    self._owner[rank] = host
                    return RankLease(self, rank)
        return None

    def vacate(self, rank: int) -> None:
        with self._lock:
            self._owner[rank] = None

    def occupied(self) -> int:
        return sum(o is not None for o in self._owner)


@dataclass
class RankLease:
    table: RankTable
    rank: int
    alive: bool = True

    def revoke(self) -> None:
        if self.alive:
            self.alive = False
            self.table.vacate(self.rank)


@dataclass
class KeyLease:
    store: "LeaseStore"
    key: str
    since: float

    def revoke(self) -> None:
        self.store.drop(self)


class LeaseStore:
    def __init__(self) -> None:
        self._held: dict[str, KeyLease] = {}

    def try_lock(self, key: str) -> Optional[KeyLease]:
        if key in self._held:
            return None
        lease = self._held[key] = KeyLease(self, key, time.monotonic())
        return lease

    def drop(self, lease: KeyLease) -> None:
        self._held.pop(lease.key, None)

    def lock(self, key: str, deadline: float) -> Optional[KeyLease]:
        while time.monotonic() < deadline:
            lease = self.try_lock(key)  # clean: handed on, None goes round
            if lease is not None:
                return lease
            time.sleep(0.05)
        return None


@dataclass
class Member:
    host: str
    rank: Optional[RankLease] = None
    port: Optional[int] = None
    shadows: list[Leasable] = field(default_factory=list)


class Coordinator:
    def __init__(self, ranks: RankTable, ports: PortRange, store: LeaseStore) -> None:
        self.ranks = ranks
        self.ports = ports
        self.store = store
        self.members: dict[str, Member] = {}
        self.spares: list[RankLease] = []

    def admit(self, host: str) -> Optional[Member]:
        if host in self.members:
            return self.members[host]
        rank = self.ranks.join(host)  # clean: revoked when no port is left, else the member's
        if rank is None:
            return None
        port = self.ports.take_bindable()  # clean: the member's, expel puts it back
        if port is None:
            rank.revoke()
            return None
        member = self.members[host] = Member(host, rank, port)
        return member

    def admit_locked(self, host: str, deadline: float) -> Optional[Member]:
        lock = self.store.lock("members", deadline)  # leak: a full world returns without revoking the lock
        if lock is None:
            return None
        member = self.admit(host)  # clean: near miss, stands in the table of members until expelled
        if member is None:
            log.warning("no place for %s", host)
            return None
        lock.revoke()
        return member

    def expel(self, host: str) -> None:
        member = self.members.pop(host, None)
        if member is None:
            return
        if member.rank is not None:
            member.rank.revoke()
        if member.port is not None:
            self.ports.put_port(member.port)
        for extra in member.shadows:
            extra.revoke()

    def add_shadow(self, host: str) -> bool:
        member = self.members.get(host)
        if member is None:
            return False
        lease = self.ranks.join(host + "#shadow")  # clean: near miss, among the shadows that expel revokes
        if lease is None:
            return False
        member.shadows.append(lease)
        return True

    def reserve_spares(self, n: int) -> int:
        for i in range(n):
            lease = self.ranks.join(f"spare{i}")  # clean: near miss, promoted or revoked by drop_spares
            if lease is None:
                break
            self.spares.append(lease)
        return len(self.spares)

    def drop_spares(self) -> None:
        while self.spares:
            self.spares.pop().revoke()

    def promote(self, host: str) -> bool:
        """A spare takes the place of the member's rank."""
        member = self.members.get(host)
        if member is None or not self.spares:
            return False
        if member.rank is not None:
            member.rank.revoke()
        member.rank = self.spares.pop()
        return True

    def move_port(self, host: str) -> Optional[int]:
        member = self.members[host]
        fresh = self.ports.take_bindable()  # clean: near miss, the old port is put back before it is replaced
        if fresh is None:
            return None
        if member.port is not None:
            self.ports.put_port(member.port)
        member.port = fresh
        return fresh

    def free_ports(self, want: int) -> list[int]:
        """Port numbers for a dry run of the launcher; none of them stays taken."""
        got: list[int] = []
        while len(got) < want:
            port = self.ports.take_port()  # leak: too few ports, and the shorter list is left without putting it back
            if port is None:
                return []
            got.append(port)
        for port in got:
            self.ports.put_port(port)
        return got

    def ports_for(self, want: int) -> list[int]:
        got: list[int] = []
        for _ in range(want):
            port = self.ports.take_port()  # clean: handed on in the list, or put back in the rollback
            if port is None:
                for p in got:
                    self.ports.put_port(p)
                return []
            got.append(port)
        return got

    def preview_command(self, hosts: list[str]) -> str:
        """Text for the operator's confirmation prompt; the launch itself chooses its own."""
        ports = self.ports_for(len(hosts))  # leak: formatted into the text and known to nobody afterwards
        pairs = [f"{h}:{p}" for h, p in zip(hosts, ports)]
        return "launch " + ",".join(pairs)

    def rotation(self, keys: list[str]) -> Iterator[str]:
        """Yields each key while it is locked."""
        for key in keys:
            lease = self.store.try_lock(key)  # clean: revoked in finally, also when the generator is closed
            if lease is None:
                continue
            try:
                yield key
            finally:
                lease.revoke()

    def elect(self, hosts: list[str]) -> Optional[str]:
        lease = self.store.try_lock("leader")  # clean: revoked on each way out
        if lease is None:
            return None
        if not hosts:
            lease.revoke()
            return None
        leader = min(hosts)
        log.info("leader is %s", leader)
        lease.revoke()
        return leader

    def barrier(self, name: str, expected: int, timeout: float) -> bool:
        end = time.monotonic() + timeout
        lease = self.store.lock("barrier/" + name, end)  # leak: revoked only when the world fills up in time
        while lease is not None and time.monotonic() < end:
            if self.ranks.occupied() >= expected:
                lease.revoke()
                return True
            time.sleep(0.1)
        return False

    def world_probe(self, host: str) -> int:
        lease = self.ranks.join(host)  # clean: near miss, revoked before the number is returned
        if lease is None:
            return -1
        rank = lease.rank
        lease.revoke()
        return rank
