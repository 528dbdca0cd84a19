"""Routes chat sessions to replicas; a lease keeps a replica's KV warm for one session."""
from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Any, Callable, Dict, Iterator, List, Optional, Type

logger = logging.getLogger(__name__)


class Replica:
    def __init__(self, name: str, capacity: int, send: Callable[[str], str]) -> None:
        self.name = name
        self.capacity = capacity
        self.send = send
        self.leased = 0
        self.healthy = True


class Lease:
    def __init__(self, replica: Replica, session_id: str) -> None:
        self.replica = replica
        self.session_id = session_id
        self.open = True
        self.turns = 0


class ReplicaSet:
    def __init__(self, replicas: List[Replica]) -> None:
        self.replicas = replicas
        self._lock = threading.Lock()

    def lease(self, session_id: str, prefer: Optional[str] = None) -> Optional[Lease]:
        with self._lock:
            ranked = sorted(self.replicas, key=lambda r: (r.name != prefer, r.leased))
            for replica in ranked:
                if replica.healthy and replica.leased < replica.capacity:
                    replica.leased += 1
                    return Lease(replica, session_id)
        return None

    def give_up(self, lease: Lease) -> None:
        with self._lock:
            if lease.open:
                lease.open = False
                lease.replica.leased -= 1


class Turn:
    """`with Turn(...) as lease:` answers one turn and reports errors to the router."""

    def __init__(self, replicas: ReplicaSet, session_id: str, on_error: Callable[[str], None]) -> None:
        self.replicas = replicas
        self.session_id = session_id
        self.on_error = on_error
        self.lease: Optional[Lease] = None

    def __enter__(self) -> Optional[Lease]:
        self.lease = self.replicas.lease(self.session_id)  # leak: __exit__ returns early on ConnectionError and never gives it up
        return self.lease

    def __exit__(
        self,
        exc_type: Optional[Type[BaseException]],
        exc: Optional[BaseException],
        tb: Optional[TracebackType],
    ) -> bool:
        if exc_type is not None and issubclass(exc_type, ConnectionError):
            self.on_error(self.session_id)
            return True
        if self.lease is not None:
            self.replicas.give_up(self.lease)
        return False


class ProbeTurn:
    def __init__(self, replicas: ReplicaSet) -> None:
        self.replicas = replicas
        self.lease: Optional[Lease] = None

    def __enter__(self) -> Optional[Lease]:
        self.lease = self.replicas.lease("probe")  # clean: near miss, __exit__ gives it up before it swallows the error
        return self.lease

    def __exit__(self, exc_type: Optional[Type[BaseException]], exc: Any, tb: Any) -> bool:
        if self.lease is not None:
            self.replicas.give_up(self.lease)
            self.lease = None
        return exc_type is not None and issubclass(exc_type, ConnectionError)


class Router:
    def __init__(self, replicas: ReplicaSet, idle_s: float = 120.0) -> None:
        self.replicas = replicas
        self.idle_s = idle_s
        self.sessions: Dict[str, Lease] = {}
        self.shadows: Dict[str, Lease] = {}
        self.last_seen: Dict[str, float] = {}
        self.errors: Dict[str, int] = {}

    def _count_error(self, session_id: str) -> None:
        self.errors[session_id] = self.errors.get(session_id, 0) + 1

    def ensure(self, session_id: str) -> Optional[Lease]:
        lease = self.sessions.get(session_id)
        if lease is None:
            lease = self.replicas.lease(session_id)  # clean: near miss, stored under the session, which drop and sweep give up
            if lease is None:
                return None
            self.sessions[session_id] = lease
        self.last_seen[session_id] = time.monotonic()
        return lease

    def migrate(self, session_id: str) -> bool:
        fresh = self.replicas.lease(session_id)  # leak: a lease on the same replica returns False with the second lease open
        if fresh is None:
            return False
        old = self.sessions.get(session_id)
        if old is not None and old.replica is fresh.replica:
            return False
        if old is not None:
            self.replicas.give_up(old)
        self.sessions[session_id] = fresh
        return True

    def rebalance(self, session_id: str, target: str) -> bool:
        fresh = self.replicas.lease(session_id, prefer=target)  # clean: near miss, given up when it is not on the target
        if fresh is None:
            return False
        if fresh.replica.name != target:
            self.replicas.give_up(fresh)
            return False
        old = self.sessions.pop(session_id, None)
        if old is not None:
            self.replicas.give_up(old)
        self.sessions[session_id] = fresh
        return True

    def add_shadow(self, session_id: str) -> bool:
        if session_id in self.shadows:
            return True
        shadow = self.replicas.lease(session_id)  # leak: drop and sweep only look at sessions, shadows are never given up
        if shadow is None:
            return False
        self.shadows[session_id] = shadow
        return True

    def ask(self, session_id: str, text: str) -> Optional[str]:
        lease = self.ensure(session_id)  # clean: near miss, an unhealthy replica drops the whole session
        if lease is None:
            return None
        try:
            lease.turns += 1
            return lease.replica.send(text)
        except ConnectionError:
            lease.replica.healthy = False
            self.drop(session_id)
            return None

    def ask_once(self, session_id: str, text: str) -> Optional[str]:
        with Turn(self.replicas, session_id, self._count_error) as lease:  # leak: the context swallows ConnectionError with the lease open
            if lease is None:
                return None
            return lease.replica.send(text)
        return None

    def ping(self) -> bool:
        with ProbeTurn(self.replicas) as lease:  # clean: the context gives it up on every way out
            return lease is not None and bool(lease.replica.send("ping"))
        return False

    def fan_out(self, text: str, width: int) -> Iterator[str]:
        leases: List[Lease] = []
        for i in range(width):
            lease = self.replicas.lease(f"fan-{i}")  # leak: an empty reply breaks out and leases behind it are not given up
            if lease is not None:
                leases.append(lease)
        for lease in leases:
            reply = lease.replica.send(text)
            self.replicas.give_up(lease)
            if not reply:
                break
            yield reply

    def drop(self, session_id: str) -> None:
        lease = self.sessions.pop(session_id, None)
        self.last_seen.pop(session_id, None)
        if lease is not None:
            self.replicas.give_up(lease)

    def sweep(self) -> int:
        now = time.monotonic()
        stale = [s for s in self.sessions if now - self.last_seen.get(s, 0.0) > self.idle_s]
        for session_id in stale:
            self.drop(session_id)
        return len(stale)
