"""HostPool: regions of an arena with a limit on how many are out."""
from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Iterator, List, Optional

from .arena import Arena, Region


class HostPool:
    def __init__(self, arena: Arena, max_out: int) -> None:
        self.arena = arena
        self._room = threading.Semaphore(max_out)
        self._mu = threading.Lock()
        self.refused = 0

    def reserve(self, nbytes: int, timeout: float = 1.0) -> Optional[Region]:
        if not self._room.acquire(timeout=timeout):  # leak: not released when the arena has no hole
            return None
        with self._mu:
            r = self.arena.cut(nbytes)  # clean: returned to the caller
        if r is None:
            self.refused += 1
            return None
        return r

    def try_reserve(self, nbytes: int) -> Optional[Region]:
        if not self._room.acquire(blocking=False):  # clean: released when the arena has no hole, else by cancel()
            return None
        with self._mu:
            r = self.arena.cut(nbytes)  # clean: returned to the caller
        if r is None:
            self._room.release()
        return r

    def cancel(self, r: Region) -> None:
        with self._mu:
            self.arena.fill(r)
        self._room.release()


@contextmanager
def hold(pool: HostPool, nbytes: int) -> Iterator[Optional[Region]]:
    r = pool.try_reserve(nbytes)  # clean: cancelled in finally if there is one
    try:
        yield r
    finally:
        if r is not None:
            pool.cancel(r)


class LeaseSet:
    """Regions that end together."""

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        self.regions: List[Region] = []

    def add(self, nbytes: int) -> Optional[Region]:
        r = self.pool.reserve(nbytes)  # clean: near miss, kept in regions, which end() cancels
        if r is not None:
            self.regions.append(r)
        return r

    def end(self) -> None:
        while self.regions:
            self.pool.cancel(self.regions.pop())

    def __enter__(self) -> "LeaseSet":
        return self

    def __exit__(self, *exc) -> None:
        self.end()
