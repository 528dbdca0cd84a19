from __future__ import annotations

import logging
from typing import Callable, Optional

from .regions import MemoryRegion, RegionTable, RegistrationError

logger = logging.getLogger(__name__)


class PeerSession:
    """A connection to one peer; owns its bounce region unless it was lent one."""

    def __init__(self, table: RegionTable, peer: str, nbytes: int, region: Optional[MemoryRegion] = None) -> None:
        self.table = table
        self.peer = peer
        self._own_region = region is None
        self.region = table.register(nbytes) if self._own_region else region  # clean: near miss, shutdown() deregisters under the same flag
        self.alive = True

    def shutdown(self) -> None:
        if not self.alive:
            return
        self.alive = False
        if self._own_region:
            self.table.deregister(self.region)


class SessionFactory:
    def __init__(self, table: RegionTable, handshake: Callable[[str], bool], nbytes: int = 64) -> None:
        self.table = table
        self.handshake = handshake
        self.nbytes = nbytes

    def open(self, peer: str) -> PeerSession:
        return PeerSession(self.table, peer, self.nbytes)  # clean: returned to the caller

    def dial(self, peer: str, attempts: int = 3) -> Optional[PeerSession]:
        """Opens and shakes hands; the peer may still be loading weights."""
        for i in range(attempts):
            session = self.open(peer)  # leak: a refused handshake goes into the next attempt with the session open
            if self.handshake(peer):
                return session
            logger.info("%s refused (attempt %d)", peer, i + 1)
        return None

    def dial_patiently(self, peer: str, attempts: int = 10) -> Optional[PeerSession]:
        session: Optional[PeerSession] = None
        for _ in range(attempts):
            try:
                session = session or self.open(peer)  # clean: near miss, kept over the attempts, shut down when they are used up
            except RegistrationError:
                continue
            if self.handshake(peer):
                return session
        if session is not None:
            session.shutdown()
        return None
