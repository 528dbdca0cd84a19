from __future__ import annotations

import threading
from typing import Dict, List, Optional


class Session:
    def __init__(self, peer: str, qp: int) -> None:
        self.peer = peer
        self.qp = qp
        self.alive = True

    def post_write(self, key: int, nbytes: int) -> int:
        if not self.alive:
            raise ConnectionError(self.peer)
        return nbytes


class PeerDirectory:
    """Queue pairs per peer: `open_session` takes one, `close_session` returns it."""

    def __init__(self, qps_per_peer: int) -> None:
        self._qps_per_peer = qps_per_peer
        self._idle: Dict[str, List[Session]] = {}
        self._made: Dict[str, int] = {}
        self._mu = threading.Lock()

    def open_session(self, peer: str) -> Optional[Session]:
        with self._mu:
            idle = self._idle.setdefault(peer, [])
            if idle:
                return idle.pop()
            n = self._made.get(peer, 0)
            if n == self._qps_per_peer:
                return None
            self._made[peer] = n + 1
            return Session(peer, n)

    def close_session(self, session: Session) -> None:
        with self._mu:
            self._idle[session.peer].append(session)
