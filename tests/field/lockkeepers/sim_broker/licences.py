"""Floating licences of the physics engine and the ports of its servers."""
from __future__ import annotations

import threading
from typing import Optional, Set


class PortRange:
    def __init__(self, first: int, last: int) -> None:
        self._free: Set[int] = set(range(first, last + 1))
        self._lock = threading.Lock()

    def pick(self) -> Optional[int]:
        with self._lock:
            return self._free.pop() if self._free else None

    def give(self, port: int) -> None:
        with self._lock:
            self._free.add(port)


class LicenceServer:
    """check_out() blocks until a seat is free; check_in() takes the key back."""

    def __init__(self, seats: int) -> None:
        self._sem = threading.BoundedSemaphore(seats)
        self._mutex = threading.Lock()
        self._keys: Set[str] = set()
        self._serial = 0

    def check_out(self, feature: str) -> str:
        self._sem.acquire()  # clean: near miss, check_in() releases it with the key
        with self._mutex:
            self._serial += 1
            key = f"{feature}:{self._serial}"
            self._keys.add(key)
        return key

    def check_out_soon(self, feature: str, timeout: float) -> Optional[str]:
        if not self._sem.acquire(timeout=timeout):  # clean: the return is for a semaphore that was not taken
            return None
        with self._mutex:
            self._serial += 1
            key = f"{feature}:{self._serial}"
            self._keys.add(key)
        return key

    def check_in(self, key: str) -> None:
        with self._mutex:
            self._keys.discard(key)
        self._sem.release()


class StrictLicenceServer(LicenceServer):
    """Refuses features that are not in the contract."""

    def __init__(self, seats: int, features: Set[str]) -> None:
        super().__init__(seats)
        self.features = features

    def check_out_soon(self, feature: str, timeout: float) -> Optional[str]:
        if not self._sem.acquire(timeout=timeout):  # leak: refused feature, seat stays
            return None
        if feature not in self.features:
            return None
        with self._mutex:
            self._serial += 1
            key = f"{feature}:{self._serial}"
            self._keys.add(key)
        return key
