from __future__ import annotations

from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class Region:
    key: int
    addr: int
    length: int


class RegistrationTable:
    def __init__(self) -> None:
        self._next_key = 1
        self.live: dict[int, Region] = {}

    def register(self, addr: int, length: int) -> Region:
        region = Region(self._next_key, addr, length)
        self._next_key += 1
        self.live[region.key] = region
        return region

    def deregister(self, region: Region) -> None:
        self.live.pop(region.key)

    def register_layers(self, layers: list[tuple[int, int]], align: int) -> Optional[list[Region]]:
        regions: list[Region] = []
        for addr, length in layers:
            if addr % align:
                return None
            regions.append(self.register(addr, length))  # leak: a misaligned later layer returns None without deregistering the earlier ones
        return regions


class StagingRing:
    def __init__(self, entries: int) -> None:
        self._free = list(range(entries))
        self.data: dict[int, bytes] = {}

    def obtain(self) -> int:
        return self._free.pop() if self._free else -1

    def relinquish(self, entry: int) -> None:
        self.data.pop(entry, None)
        self._free.append(entry)
