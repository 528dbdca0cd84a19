from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Optional


@dataclass
class Replica:
    url: str
    load: int = 0
    draining: bool = False


@dataclass
class StickySession:
    sid: str
    replica: Replica
    touched: float = field(default_factory=time.monotonic)


class ReplicaSet:
    def __init__(self, urls: list[str], max_load: int) -> None:
        self.replicas = [Replica(u) for u in urls]
        self.max_load = max_load

    def pick(self) -> Optional[Replica]:
        ready = [r for r in self.replicas if not r.draining and r.load < self.max_load]
        if not ready:
            return None
        best = min(ready, key=lambda r: r.load)
        best.load += 1
        return best

    def unpick(self, replica: Replica) -> None:
        replica.load -= 1


class SessionTable:
    def __init__(self, replicas: ReplicaSet) -> None:
        self.replicas = replicas
        self._by_id: dict[str, StickySession] = {}

    def open(self, sid: str) -> Optional[StickySession]:
        session = self._by_id.get(sid)
        if session is not None:
            session.touched = time.monotonic()
            return session
        replica = self.replicas.pick()  # clean: near miss, kept in the table until close or sweep
        if replica is None:
            return None
        session = self._by_id[sid] = StickySession(sid, replica)
        return session

    def close(self, sid: str) -> None:
        session = self._by_id.pop(sid, None)
        if session is not None:
            self.replicas.unpick(session.replica)

    def sweep(self, max_idle: float) -> int:
        now = time.monotonic()
        stale = [sid for sid, s in self._by_id.items() if now - s.touched > max_idle]
        for sid in stale:
            self.close(sid)
        return len(stale)

    def reassign(self, sid: str) -> bool:
        session = self._by_id.get(sid)
        if session is None:
            return False
        replica = self.replicas.pick()  # leak: the load of the former replica is overwritten in the session
        if replica is None:
            return False
        session.replica = replica
        return True

    def rebalance(self) -> int:
        moved = 0
        for session in self._by_id.values():
            if not session.replica.draining:
                continue
            replica = self.replicas.pick()  # clean: near miss, the former replica is unpicked before it is replaced
            if replica is None:
                break
            self.replicas.unpick(session.replica)
            session.replica = replica
            moved += 1
        return moved
