from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class Region:
    rkey: int
    length: int


class MemoryRegistry:
    """Registered memory regions; the NIC has a limited number of them."""

    def __init__(self, limit: int = 256) -> None:
        self.limit = limit
        self._keys = itertools.count(1)
        self._regions: dict[int, bytearray] = {}

    def register(self, buf: bytearray) -> Region:
        if len(self._regions) >= self.limit:
            raise MemoryError("out of memory regions")
        region = Region(next(self._keys), len(buf))
        self._regions[region.rkey] = buf
        return region

    def deregister(self, region: Region) -> None:
        del self._regions[region.rkey]

    def view(self, region: Region) -> bytearray:
        return self._regions[region.rkey]

    def count(self) -> int:
        return len(self._regions)
