from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional


class RegistrationError(RuntimeError):
    pass


@dataclass(frozen=True)
class Region:
    lkey: int
    addr: int
    length: int


class MemoryRegistry:
    """register/deregister of memory regions; the NIC has a hard limit on live keys."""

    def __init__(self, max_regions: int = 64) -> None:
        self.max_regions = max_regions
        self._live: Dict[int, Region] = {}
        self._next_key = 1

    def register(self, addr: int, length: int) -> Region:
        if len(self._live) >= self.max_regions:
            raise RegistrationError("region table is full")
        region = Region(self._next_key, addr, length)
        self._next_key += 1
        self._live[region.lkey] = region
        return region

    def deregister(self, region: Region) -> None:
        del self._live[region.lkey]


class BounceBuffer:
    def __init__(self, addr: int, size: int) -> None:
        self.addr = addr
        self.size = size
        self.region: Optional[Region] = None
        self.payload = b""


class BouncePool:
    """Pre-registered bounce buffers."""

    def __init__(self, registry: MemoryRegistry, count: int, size: int) -> None:
        self.registry = registry
        self._idle: List[BounceBuffer] = []
        for i in range(count):
            buf = BounceBuffer(0x1000 + i * size, size)
            buf.region = registry.register(buf.addr, size)  # clean: near miss, held by the buffer, close deregisters
            self._idle.append(buf)

    def lease(self) -> Optional[BounceBuffer]:
        return self._idle.pop() if self._idle else None

    def give_back(self, buf: BounceBuffer) -> None:
        buf.payload = b""
        self._idle.append(buf)

    def close(self) -> None:
        for buf in self._idle:
            self.registry.deregister(buf.region)
            buf.region = None
        self._idle.clear()

    def grow(self, addr: int, size: int, limit: int) -> bool:
        buf = BounceBuffer(addr, size)
        buf.region = self.registry.register(addr, size)  # leak: over the limit the fresh buffer is thrown away with its region
        if len(self._idle) >= limit:
            return False
        self._idle.append(buf)
        return True
