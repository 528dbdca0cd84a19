"""Routing table with a reader/writer lock; readers take snapshots, one writer swaps."""
from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Callable, Iterator, Optional

log = logging.getLogger("routing")


@dataclass(frozen=True)
class Route:
    model: str
    backend: str
    weight: float


class ReadWriteLock:
    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._readers = 0
        self._writer = False

    def lock_read(self) -> None:
        with self._cond:  # clean: with statement
            while self._writer:
                self._cond.wait()
            self._readers += 1  # clean: the caller unlocks

    def unlock_read(self) -> None:
        with self._cond:  # clean: with statement
            self._readers -= 1
            if self._readers == 0:
                self._cond.notify_all()

    def lock_write(self, timeout: Optional[float] = None) -> bool:
        with self._cond:  # clean: with statement
            ok = self._cond.wait_for(lambda: not self._writer and self._readers == 0, timeout)
            if ok:
                self._writer = True  # clean: the caller unlocks when True is returned
            return ok

    def unlock_write(self) -> None:
        with self._cond:  # clean: with statement
            self._writer = False
            self._cond.notify_all()

    @contextmanager
    def reading(self) -> Iterator[None]:
        self.lock_read()  # clean: unlocked in the finally
        try:
            yield
        finally:
            self.unlock_read()


class RoutingTable:
    def __init__(self, load: Callable[[], list[Route]]) -> None:
        self._rw = ReadWriteLock()
        self._load = load
        self._routes: dict[str, list[Route]] = {}
        self.version = 0

    def lookup(self, model: str) -> Optional[Route]:
        self._rw.lock_read()  # leak: an unknown model returns while still reading
        routes = self._routes.get(model)
        if not routes:
            return None
        best = max(routes, key=lambda r: r.weight)
        self._rw.unlock_read()
        return best

    def backends(self, model: str) -> list[str]:
        with self._rw.reading():  # clean: context manager
            routes = self._routes.get(model)
            if routes is None:
                return []
            return [r.backend for r in routes]

    def models(self) -> list[str]:
        self._rw.lock_read()  # clean: near miss, the answer is made up first and unlocked before either return
        names = list(self._routes)
        self._rw.unlock_read()
        if not names:
            return []
        return sorted(names)

    def reload(self) -> bool:
        if not self._rw.lock_write(timeout=5.0):  # leak: a failed load is caught and the writer stays locked
            return False
        try:
            fresh = self._load()
        except OSError as exc:
            log.error("reload: %s", exc)
            return False
        self._routes = {}
        for r in fresh:
            self._routes.setdefault(r.model, []).append(r)
        self.version += 1
        self._rw.unlock_write()
        return True

    def reload_outside(self) -> bool:
        fresh = self._load()
        if not self._rw.lock_write(timeout=5.0):  # clean: near miss, an unchanged table goes to the finally
            return False
        try:
            flat = [r for rs in self._routes.values() for r in rs]
            if flat == fresh:
                return False
            self._routes = {}
            for r in fresh:
                self._routes.setdefault(r.model, []).append(r)
            self.version += 1
            return True
        finally:
            self._rw.unlock_write()

    def drain(self, backend: str) -> int:
        self._rw.lock_write()  # leak: nothing matching returns zero with the writer locked
        hits = [m for m, rs in self._routes.items() if any(r.backend == backend for r in rs)]
        if not hits:
            return 0
        for m in hits:
            self._routes[m] = [r for r in self._routes[m] if r.backend != backend]
        self.version += 1
        self._rw.unlock_write()
        return len(hits)

    def reweight(self, model: str, weights: list[float]) -> bool:
        self._rw.lock_write()  # clean: near miss, the length mismatch unlocks too
        routes = self._routes.get(model, [])
        if len(routes) != len(weights):
            self._rw.unlock_write()
            return False
        self._routes[model] = [Route(r.model, r.backend, w) for r, w in zip(routes, weights)]
        self._rw.unlock_write()
        return True

    def rename(self, old: str, new: str) -> None:
        self._rw.lock_write()  # leak: the clash raises while the writer is locked
        if new in self._routes:
            raise KeyError(new)
        self._routes[new] = self._routes.pop(old, [])
        self._rw.unlock_write()

    def walk(self, visit: Callable[[Route], bool]) -> int:
        seen = 0
        for model in self.models():
            self._rw.lock_read()  # leak: the visitor's stop breaks out of the loop while reading
            routes = self._routes.get(model, [])
            seen += len(routes)
            if routes and not visit(routes[0]):
                break
            self._rw.unlock_read()
        return seen
