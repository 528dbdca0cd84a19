"""Registered staging memory and queue-pair channels between prefill and decode nodes."""
from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class StagingRegion:
    offset: int
    nbytes: int
    rkey: int = 0
    filled: int = 0


class StagingPool:
    def __init__(self, total: int, unit: int):
        self.unit = unit
        self._regions = [StagingRegion(i, unit, rkey=i ^ 0x5A5A) for i in range(0, total, unit)]
        self._cv = threading.Condition()

    def obtain(self, nbytes: int, timeout: float | None = None) -> StagingRegion | None:
        if nbytes > self.unit:
            return None
        with self._cv:
            if not self._cv.wait_for(lambda: self._regions, timeout):
                return None
            region = self._regions.pop()
            region.filled = 0
            return region

    def restore(self, region: StagingRegion) -> None:
        with self._cv:
            self._regions.append(region)
            self._cv.notify()

    def obtain_many(self, sizes: list[int]) -> list[StagingRegion]:
        got: list[StagingRegion] = []
        for size in sizes:
            region = self.obtain(size, timeout=0.05)  # clean: returned together, or restored below
            if region is None:
                self.restore_many(got)
                return []
            got.append(region)
        return got

    def restore_many(self, regions: list[StagingRegion]) -> None:
        for region in regions:
            self.restore(region)


@dataclass
class Channel:
    peer: str
    posted: list[int] = field(default_factory=list)
    broken: bool = False


class ChannelTable:
    """At most `limit` live queue pairs per peer."""

    def __init__(self, limit: int):
        self.limit = limit
        self.live: dict[str, int] = {}
        self.idle: dict[str, list[Channel]] = {}

    def connect(self, peer: str) -> Channel | None:
        spare = self.idle.setdefault(peer, [])
        if spare:
            chan = spare.pop()
        elif self.live.get(peer, 0) < self.limit:
            chan = Channel(peer)
        else:
            return None
        self.live[peer] = self.live.get(peer, 0) + 1
        return chan

    def disconnect(self, chan: Channel) -> None:
        self.live[chan.peer] -= 1
        if not chan.broken:
            chan.posted.clear()
            self.idle[chan.peer].append(chan)
