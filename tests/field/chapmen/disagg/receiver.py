"""Decode side: landing zones for announced transfers."""
from __future__ import annotations

import queue
import threading
from typing import Callable, Dict, List, Optional, Tuple

from .regions import Region, RegionArena


class LandingZones:
    def __init__(self, arena: RegionArena) -> None:
        self.arena = arena
        self._zones: Dict[str, List[Region]] = {}
        self._ready: "queue.Queue[Optional[Tuple[str, Region]]]" = queue.Queue()
        self._mu = threading.Lock()

    def announce(self, rid: str, sizes: List[int]) -> Optional[List[int]]:
        """Remote offsets for a request whose pages will arrive."""
        zones: List[Region] = []
        for size in sizes:
            zone = self.arena.carve(size)  # clean: stored under rid (consume/cancel restore), or undone here
            if zone is None:
                while zones:
                    self.arena.restore(zones.pop())
                return None
            zones.append(zone)
        with self._mu:
            self._zones.setdefault(rid, []).extend(zones)
        return [z.offset for z in zones]

    def consume(self, rid: str, sink: Callable[[Region], None]) -> int:
        with self._mu:
            zones = self._zones.pop(rid, [])
        for zone in zones:
            sink(zone)
            self.arena.restore(zone)
        return len(zones)

    def cancel(self, rid: str) -> None:
        self.consume(rid, lambda zone: None)

    def accept(self, rid: str, nbytes: int) -> bool:
        zone = self.arena.carve(nbytes)  # leak: drain() throws queued zones away unrestored
        if zone is None:
            return False
        self._ready.put((rid, zone))
        return True

    def pump(self, sink: Callable[[str, Region], None]) -> None:
        while True:
            item = self._ready.get()
            if item is None:
                return
            rid, zone = item
            sink(rid, zone)
            self.arena.restore(zone)

    def drain(self) -> None:
        while not self._ready.empty():
            self._ready.get_nowait()
        self._ready.put(None)


class MetadataMailbox:
    """One small zone per peer for bootstrap metadata."""

    def __init__(self, arena: RegionArena, zone_bytes: int = 512) -> None:
        self.arena = arena
        self.zone_bytes = zone_bytes
        self._by_peer: Dict[str, Region] = {}

    def zone_for(self, peer: str) -> Optional[int]:
        zone = self._by_peer.get(peer)
        if zone is None:
            zone = self.arena.carve(self.zone_bytes)  # clean: kept per peer, forget_peer() restores it
            if zone is None:
                return None
            self._by_peer[peer] = zone
        return zone.offset

    def resize(self, peer: str, nbytes: int) -> Optional[int]:
        grown = self.arena.carve(nbytes)  # clean: becomes the peer's zone, the previous one is restored
        if grown is None:
            return None
        previous = self._by_peer.pop(peer, None)
        if previous is not None:
            self.arena.restore(previous)
        self._by_peer[peer] = grown
        return grown.offset

    def rename(self, old: str, new: str) -> None:
        zone = self._by_peer.pop(old, None)
        if zone is not None:
            replaced = self._by_peer.get(new)
            if replaced is not None:
                self.arena.restore(replaced)
            self._by_peer[new] = zone

    def forget_peer(self, peer: str) -> None:
        zone = self._by_peer.pop(peer, None)
        if zone is not None:
            self.arena.restore(zone)

    def ping_pong(self, peers: List[str]) -> Dict[str, int]:
        """Sizes the temporary reply zones of a bootstrap round."""
        replies: Dict[str, Region] = {}
        for peer in peers:
            region = self.arena.carve(self.zone_bytes)  # leak: only zones above the first page are restored
            if region is None:
                break
            replies[peer] = region
        offsets = {peer: region.offset for peer, region in replies.items()}
        for region in replies.values():
            if region.offset > 0:
                self.arena.restore(region)
        return offsets
