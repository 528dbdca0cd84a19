"""Decode side: landing zones are registered up front and advertised to the prefill node."""
from __future__ import annotations

from typing import Callable, Dict, List, Optional

from .peers import PeerDirectory, Session
from .regions import Region, RegionTable


class LandingZone:
    def __init__(self, region: Region, on_done: Callable[[Region], None]) -> None:
        self.region = region
        self._on_done = on_done

    def complete(self) -> None:
        self._on_done(self.region)


class KVReceiver:
    def __init__(self, table: RegionTable, peers: PeerDirectory) -> None:
        self.table = table
        self.peers = peers
        self.landing: Dict[str, Region] = {}
        self.control: Dict[str, Session] = {}
        self.zones: List[LandingZone] = []

    def advertise(self, req_id: str, addr: int, nbytes: int) -> int:
        """Called again under the same id when a prefill node restarts."""
        region = self.table.register(addr, nbytes)  # leak: a re-advertised request overwrites its entry
        self.landing[req_id] = region
        return region.key

    def arrived(self, req_id: str) -> None:
        region = self.landing.pop(req_id)
        self.table.deregister(region)

    def expire(self, now: float, deadline: Dict[str, float]) -> int:
        n = 0
        for req_id in list(self.landing):
            if deadline.get(req_id, now) < now:
                self.table.deregister(self.landing.pop(req_id))
                n += 1
        return n

    def zone(self, addr: int, nbytes: int) -> LandingZone:
        region = self.table.register(addr, nbytes)  # clean: near miss, the zone's callback deregisters
        zone = LandingZone(region, self.table.deregister)
        self.zones.append(zone)
        return zone

    def drain_zones(self) -> None:
        while self.zones:
            self.zones.pop().complete()

    def control_session(self, peer: str) -> Optional[Session]:
        session = self.control.get(peer)
        if session is None:
            session = self.peers.open_session(peer)  # clean: cached in control, closed in shutdown
            if session is not None:
                self.control[peer] = session
        return session

    def handshake(self, peer: str, addr: int, nbytes: int) -> Optional[int]:
        session = self.peers.open_session(peer)  # clean: near miss, closed on every branch
        if session is None:
            return None
        region = self.table.try_register(addr, nbytes)  # leak: rejected handshake closes the session only
        if region is None:
            self.peers.close_session(session)
            return None
        if session.post_write(region.key, 0) < 0:
            self.peers.close_session(session)
            return None
        self.peers.close_session(session)
        self.landing.setdefault(f"{peer}:{region.key}", region)
        return region.key

    def forget_peer(self, peer: str) -> None:
        session = self.control.pop(peer, None)
        if session is not None:
            self.peers.close_session(session)
        for req_id in [r for r in self.landing if r.startswith(f"{peer}:")]:
            self.table.deregister(self.landing.pop(req_id))

    def shutdown(self) -> None:
        for session in self.control.values():
            self.peers.close_session(session)
        self.control.clear()
        for region in self.landing.values():
            self.table.deregister(region)
        self.landing.clear()
