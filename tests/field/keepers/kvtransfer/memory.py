"""Memory registered with the NIC, cut from one big pinned buffer."""
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Dict, List, Optional


@dataclass(frozen=True)
class Region:
    key: int
    offset: int
    nbytes: int


class RegionTable:
    def __init__(self, total: int, unit: int) -> None:
        self.unit = unit
        self._lock = threading.Lock()
        self._units: List[int] = list(range(0, total, unit))
        self._live: Dict[int, Region] = {}
        self._next_key = 1

    def register(self, nbytes: int) -> Optional[Region]:
        if nbytes > self.unit:
            return None
        with self._lock:
            if not self._units:
                return None
            region = Region(self._next_key, self._units.pop(), nbytes)
            self._next_key += 1
            self._live[region.key] = region
            return region

    def deregister(self, region: Region) -> None:
        with self._lock:
            if self._live.pop(region.key, None) is not None:
                self._units.append(region.offset)

    def register_layers(self, sizes: List[int]) -> Optional[List[Region]]:
        regions: List[Region] = []
        for nbytes in sizes:
            region = self.register(nbytes)  # clean: near miss, a failed layer deregisters the ones before, else returned
            if region is None:
                for done in regions:
                    self.deregister(done)
                return None
            regions.append(region)
        return regions
