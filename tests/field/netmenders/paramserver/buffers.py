from __future__ import annotations

import threading
from collections import Counter, defaultdict
from typing import Optional

CLASSES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)


class WireBuffers:
    """bytearrays by size class. rent() answers None when the class is spent."""

    def __init__(self, per_class: int = 32):
        self._free: dict[int, list[bytearray]] = defaultdict(list)
        self._made: Counter[int] = Counter()
        self.per_class = per_class
        self._mu = threading.Lock()

    def rent(self, nbytes: int) -> Optional[bytearray]:
        cls = next((c for c in CLASSES if c >= nbytes), None)
        if cls is None:
            return None
        with self._mu:
            if self._free[cls]:
                return self._free[cls].pop()
            if self._made[cls] >= self.per_class:
                return None
            self._made[cls] += 1
            return bytearray(cls)

    def unrent(self, buf: bytearray) -> None:
        with self._mu:
            self._free[len(buf)].append(buf)


class VersionPins:
    """A pinned version of the weights is not collected."""

    def __init__(self) -> None:
        self._pins: Counter[int] = Counter()
        self.newest = 0

    def pin(self, version: int) -> bool:
        if version > self.newest:
            return False
        self._pins[version] += 1
        return True

    def pin_newest(self) -> int:
        self._pins[self.newest] += 1
        return self.newest

    def unpin(self, version: int) -> None:
        self._pins[version] -= 1
        if self._pins[version] <= 0:
            del self._pins[version]

    def pinned(self) -> set[int]:
        return set(self._pins)
