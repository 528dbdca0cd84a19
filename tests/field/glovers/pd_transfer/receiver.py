"""Decode side: announces landing zones and takes the pages out of them."""
from __future__ import annotations

from .ring import HandleTable, RegisteredRing, Segment


class LandingZone:
    """Owns a segment; free() may be called more than once."""

    def __init__(self, ring: RegisteredRing, size: int):
        self.ring = ring
        self.seg: Segment | None = ring.carve(size)  # clean: retired by free

    @property
    def usable(self) -> bool:
        return self.seg is not None

    def free(self) -> None:
        if self.seg is not None:
            self.ring.retire(self.seg)
            self.seg = None


class Receiver:
    def __init__(self, ring: RegisteredRing, handles: HandleTable, nic):
        self.ring = ring
        self.handles = handles
        self.nic = nic
        self.zones: dict[str, LandingZone] = {}

    def announce(self, rid: str, size: int) -> int | None:
        if rid in self.zones:
            return None
        zone = LandingZone(self.ring, size)  # clean: in zones, collect and drop free it
        if not zone.usable:
            return None
        self.zones[rid] = zone
        return zone.seg.start

    def collect(self, rid: str) -> bytes | None:
        zone = self.zones.pop(rid, None)
        if zone is None:
            return None
        data = self.nic.read(zone.seg.start, zone.seg.size)
        zone.free()
        return data

    def drop(self, rid: str) -> None:
        zone = self.zones.pop(rid, None)
        if zone is not None:
            zone.free()

    def pull(self, peer: str, size: int) -> bytes | None:
        zone = LandingZone(self.ring, size)  # leak: a failed fetch returns None without free
        if not zone.usable:
            return None
        if not self.nic.fetch(peer, zone.seg.start, size):
            return None
        data = self.nic.read(zone.seg.start, size)
        zone.free()
        return data
