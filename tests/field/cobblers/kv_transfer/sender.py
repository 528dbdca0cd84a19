from __future__ import annotations

import logging
from typing import Callable, Dict, List, Optional

from .regions import MemoryRegion, RegionTable
from .session import PeerSession, SessionFactory

logger = logging.getLogger(__name__)

Completion = Callable[[bool], None]


class KVSender:
    """Prefill side: one session per decode peer, one region per layer in flight."""

    def __init__(self, table: RegionTable, factory: SessionFactory, post: Callable[[str, MemoryRegion, Completion], None]) -> None:
        self.table = table
        self.factory = factory
        self._post = post
        self.sessions: Dict[str, PeerSession] = {}

    def session_for(self, peer: str) -> Optional[PeerSession]:
        s = self.sessions.get(peer)
        if s is not None and s.alive:
            return s
        s = self.factory.dial_patiently(peer)  # clean: kept in sessions, close() shuts it down
        if s is not None:
            self.sessions[peer] = s
        return s

    def probe(self, peer: str) -> bool:
        """Is the peer reachable? Used by the router before it routes."""
        s = self.factory.dial_patiently(peer, attempts=1)  # leak: the session of a successful probe is forgotten
        return s is not None and s.alive

    def send_layer(self, peer: str, payload: bytes) -> bool:
        region = self.table.register_or_none(len(payload))  # leak: without a session the region stays registered
        if region is None:
            return False
        session = self.session_for(peer)
        if session is None:
            logger.warning("no session to %s", peer)
            return False
        region.data[:] = payload
        self._post(session.peer, region, lambda ok: self.table.deregister(region))
        return True

    def send_all(self, peer: str, layers: List[bytes], done: Completion) -> int:
        """Posts layer by layer; each completion deregisters its own region."""
        left = len(layers)

        def on_done(region: MemoryRegion, ok: bool) -> None:
            nonlocal left
            self.table.deregister(region)
            left -= 1
            if left == 0:
                done(ok)

        for payload in layers:
            region = self.table.register(len(payload))  # clean: near miss, bound to its completion through the default argument
            region.data[:] = payload
            self._post(peer, region, lambda ok, r=region: on_done(r, ok))
        return left

    def close(self) -> None:
        while self.sessions:
            self.sessions.popitem()[1].shutdown()
