"""Host staging buffers and NIC memory registrations."""
from __future__ import annotations

import itertools
from typing import Dict, List, Optional


class StagingPool:
    def __init__(self, n: int, size: int) -> None:
        self.size = size
        self._idle: List[bytearray] = [bytearray(size) for _ in range(n)]

    def checkout(self) -> Optional[bytearray]:
        return self._idle.pop() if self._idle else None

    def checkin(self, buf: bytearray) -> None:
        self._idle.append(buf)


class RegistrationCache:
    """Memory handles from the transfer engine; each must be deregistered."""

    def __init__(self) -> None:
        self._next = itertools.count(1)
        self._live: Dict[int, object] = {}

    def register(self, region: object) -> int:
        handle = next(self._next)
        self._live[handle] = region
        return handle

    def deregister(self, handle: int) -> None:
        del self._live[handle]

    def live(self) -> int:
        return len(self._live)
