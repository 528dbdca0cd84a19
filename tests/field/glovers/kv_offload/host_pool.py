"""Host memory slabs and copy streams used for KV offloading."""
from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Slab:
    offset: int
    length: int


class HostPool:
    """Fixed size slabs cut out of one pinned host region."""

    def __init__(self, total: int, slab: int):
        self._lock = threading.Lock()
        self._slab = slab
        self._idle = [Slab(o, slab) for o in range(0, total, slab)]

    def reserve(self) -> Slab | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def unreserve(self, slab: Slab) -> None:
        with self._lock:
            self._idle.append(slab)

    def reserve_many(self, n: int) -> list[Slab]:
        """All n slabs or an empty list."""
        with self._lock:
            if len(self._idle) < n:
                return []
            got = self._idle[-n:] if n else []
            del self._idle[len(self._idle) - len(got):]
            return got


class StreamPool:
    def __init__(self, streams: list):
        self._streams = list(streams)
        self._cond = threading.Condition()

    def checkout(self):
        with self._cond:
            while not self._streams:
                self._cond.wait()
            return self._streams.pop()

    def checkin(self, stream) -> None:
        with self._cond:
            self._streams.append(stream)
            self._cond.notify()
