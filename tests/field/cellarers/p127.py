"""Concurrency limiter behind a protocol."""
import threading
from typing import Protocol


class Limiter(Protocol):
    def try_enter(self) -> bool: ...

    def exit(self) -> None: ...


class CountingLimiter:
    def __init__(self, most: int):
        self._most = most
        self._now = 0
        self._lock = threading.Lock()

    def try_enter(self) -> bool:
        with self._lock:
            if self._now < self._most:
                self._now += 1
                return True
            return False

    def exit(self) -> None:
        with self._lock:
            self._now -= 1


class Api:
    def __init__(self, limiter: Limiter, backend):
        self.limiter = limiter
        self.backend = backend

    def get(self, key):
        if not self.limiter.try_enter():  # clean: refused means not entered, otherwise finally
            return 429, None
        try:
            return 200, self.backend.get(key)
        finally:
            self.limiter.exit()

    def put(self, key, value):
        if not self.limiter.try_enter():  # leak: a read-only backend answers 403 without exit
            return 429
        if self.backend.readonly:
            return 403
        self.backend.put(key, value)
        self.limiter.exit()
        return 200

    def delete(self, key):
        entered = self.limiter.try_enter()  # clean: exit under the same flag
        if entered:
            self.backend.delete(key)
            self.limiter.exit()
        return entered

    def scan(self, prefix):
        if self.limiter.try_enter():  # leak: the entered branch returns without exit
            return 200, self.backend.scan(prefix)
        return 429, []


def build(most):
    return Api(CountingLimiter(most), backend={})
