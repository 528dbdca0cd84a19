from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Iterator, Optional


class StagingPool:
    def __init__(self, n: int, size: int) -> None:
        self.size = size
        self._stack = [bytearray(size) for _ in range(n)]
        self._sem = threading.Semaphore(n)
        self._mu = threading.Lock()

    def checkout(self, timeout: float = 0.05) -> Optional[bytearray]:
        if not self._sem.acquire(timeout=timeout):  # clean: checkin releases the permit
            return None
        with self._mu:
            return self._stack.pop()

    def checkout_sized(self, n: int, timeout: float = 0.05) -> Optional[bytearray]:
        if not self._sem.acquire(timeout=timeout):  # leak: an oversize wish returns None with the permit taken
            return None
        if n > self.size:
            return None
        with self._mu:
            return self._stack.pop()

    def checkin(self, b: bytearray) -> None:
        with self._mu:
            self._stack.append(b)
        self._sem.release()

    @contextmanager
    def staged(self) -> Iterator[bytearray]:
        b = self.checkout(timeout=5.0)  # clean: checked in by the finally
        if b is None:
            raise TimeoutError("staging")
        try:
            yield b
        finally:
            self.checkin(b)

    def left(self) -> int:
        return len(self._stack)
