from __future__ import annotations

from typing import Dict, List, Optional

from .regions import MemoryRegion, RegionTable
from .session import PeerSession


class KVReceiver:
    """Decode side: landing regions by request, handed to the cache once all layers arrived."""

    def __init__(self, table: RegionTable, nbytes: int) -> None:
        self.table = table
        self.nbytes = nbytes
        self.landing: Dict[str, List[MemoryRegion]] = {}

    def expect(self, rid: str, layers: int) -> Optional[List[int]]:
        """rkeys for the sender, or None when the NIC has no room for all of them."""
        regions: List[MemoryRegion] = []
        for _ in range(layers):
            region = self.table.register_or_none(self.nbytes)  # clean: near miss, rolled back as a whole or kept in landing
            if region is None:
                self._drop(regions)
                return None
            regions.append(region)
        self._drop(self.landing.pop(rid, []))
        self.landing[rid] = regions
        return [r.rkey for r in regions]

    def grow(self, rid: str, extra: int) -> bool:
        """The prompt got longer by a tool result; `rid` may have been aborted meanwhile."""
        more = [self.table.register(self.nbytes) for _ in range(extra)]  # leak: the regions for an aborted request are dropped
        current = self.landing.get(rid)
        if current is None:
            return False
        current.extend(more)
        return True

    def collect(self, rid: str) -> bytes:
        regions = self.landing.pop(rid)
        out = b"".join(bytes(r.data) for r in regions)
        self._drop(regions)
        return out

    def abort(self, rid: str) -> None:
        self._drop(self.landing.pop(rid, []))

    def loopback(self, peer: str, payload: bytes) -> bytes:
        """Self-test on a borrowed region."""
        region = self.table.register(len(payload))  # clean: near miss, lent to a session that does not own it, deregistered here
        session = PeerSession(self.table, peer, len(payload), region=region)  # clean: shut down below
        session.region.data[:] = payload
        got = bytes(session.region.data)
        session.shutdown()
        self.table.deregister(region)
        return got

    def _drop(self, regions: List[MemoryRegion]) -> None:
        for r in regions:
            self.table.deregister(r)
