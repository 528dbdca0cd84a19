"""Registered memory regions and transfer credits."""
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Dict, List, Optional


@dataclass
class Region:
    rkey: int
    offset: int
    length: int
    registered: bool = True


class RegionArena:
    """First-fit arena over one registered RDMA buffer."""

    def __init__(self, size: int, align: int = 4096) -> None:
        self.size = size
        self.align = align
        self._holes: List[List[int]] = [[0, size]]
        self._mu = threading.Lock()
        self._next_key = 1

    def _round(self, n: int) -> int:
        return (n + self.align - 1) // self.align * self.align

    def carve(self, nbytes: int) -> Optional[Region]:
        want = self._round(nbytes)
        with self._mu:
            for hole in self._holes:
                if hole[1] >= want:
                    region = Region(self._next_key, hole[0], want)
                    self._next_key += 1
                    hole[0] += want
                    hole[1] -= want
                    return region
        return None

    def restore(self, region: Region) -> None:
        with self._mu:
            region.registered = False
            self._holes.append([region.offset, region.length])
            self._coalesce()

    def _coalesce(self) -> None:
        self._holes.sort()
        merged: List[List[int]] = []
        for off, length in self._holes:
            if length == 0:
                continue
            if merged and merged[-1][0] + merged[-1][1] == off:
                merged[-1][1] += length
            else:
                merged.append([off, length])
        self._holes = merged


class Credits:
    """Flow control towards each decode peer."""

    def __init__(self, per_peer: int) -> None:
        self.per_peer = per_peer
        self._used: Dict[str, int] = {}
        self._mu = threading.Lock()

    def try_spend(self, peer: str) -> bool:
        with self._mu:
            used = self._used.get(peer, 0)
            if used >= self.per_peer:
                return False
            self._used[peer] = used + 1
            return True

    def refund(self, peer: str) -> None:
        with self._mu:
            self._used[peer] = max(0, self._used.get(peer, 0) - 1)
