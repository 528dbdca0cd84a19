"""Registered memory and metadata slots shared by both sides of a transfer."""
from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Optional


@dataclass
class Region:
    base: int
    size: int
    rkey: int
    pool: "RegisteredPool"

    def deregister(self) -> None:
        self.pool._give(self)


class RegisteredPool:
    """RDMA-registered regions. Registering is slow, so regions are kept and reused."""

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._mu = threading.Lock()
        self._ready = deque(Region(i * size, size, i ^ 0x5A, self) for i in range(count))

    def register(self) -> Optional[Region]:
        with self._mu:
            return self._ready.popleft() if self._ready else None

    def _give(self, region: Region) -> None:
        with self._mu:
            self._ready.append(region)

    def register_n(self, n: int) -> list[Region]:
        """n regions or an empty list."""
        out: list[Region] = []
        while len(out) < n:
            r = self.register()  # clean: near miss, all go back if there are too few
            if r is None:
                for old in out:
                    old.deregister()
                return []
            out.append(r)
        return out

    def register_some(self, n: int, minimum: int) -> list[Region]:
        out: list[Region] = []
        for _ in range(n):
            r = self.register()  # leak: below the minimum an empty list is returned instead
            if r is None:
                break
            out.append(r)
        return out if len(out) >= minimum else []


class MetaSlots:
    """Indices of small fixed records (first token, logprobs) next to the KV."""

    def __init__(self, n: int) -> None:
        self._ids = deque(range(n))
        self.records: dict[int, dict] = {}

    def acquire(self) -> Optional[int]:
        return self._ids.popleft() if self._ids else None

    def release(self, i: int) -> None:
        self.records.pop(i, None)
        self._ids.append(i)
