"""Router-side prefix index with striped locks and a counted reader/writer lock."""
from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from typing import Callable, Dict, Iterable, List, Optional, Set

logger = logging.getLogger(__name__)


class RWLock:

    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._readers = 0
        self._writer = False

    def read_lock(self) -> None:
        with self._cond:
            while self._writer:
                self._cond.wait()
            self._readers += 1

    def read_unlock(self) -> None:
        with self._cond:
            self._readers -= 1
            if self._readers == 0:
                self._cond.notify_all()

    def write_lock(self, timeout: Optional[float] = None) -> bool:
        with self._cond:
            ok = self._cond.wait_for(lambda: not self._writer and not self._readers, timeout)
            if ok:
                self._writer = True
            return ok

    def write_unlock(self) -> None:
        with self._cond:
            self._writer = False
            self._cond.notify_all()


class ReadGuard:

    def __init__(self, rw: RWLock, reentrant: bool = False) -> None:
        self.rw = rw
        self.depth = 0
        self.reentrant = reentrant

    def __enter__(self) -> "ReadGuard":
        if self.depth == 0:
            self.rw.read_lock()  # clean: near miss, the exit that brings depth to zero unlocks
        self.depth += 1
        return self

    def __exit__(self, exc_type, exc, tb) -> None:
        self.depth -= 1
        if self.depth:
            return
        self.rw.read_unlock()


class WriteGuard:

    def __init__(self, rw: RWLock, on_error: Optional[Callable[[BaseException], None]] = None) -> None:
        self.rw = rw
        self.on_error = on_error

    def __enter__(self) -> "WriteGuard":
        self.rw.write_lock()  # leak: __exit__ returns from the on_error branch without write_unlock
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc is not None and self.on_error is not None:
            self.on_error(exc)
            return True
        self.rw.write_unlock()
        return False


class PrefixIndex:

    def __init__(self, stripes: int = 8) -> None:
        self._locks = [threading.Lock() for _ in range(stripes)]
        self._maps: List["OrderedDict[int, Set[str]]"] = [OrderedDict() for _ in range(stripes)]
        self._rw = RWLock()
        self._workers: Set[str] = set()

    def _stripe(self, h: int) -> int:
        return h % len(self._locks)

    # -- stripes -------------------------------------------------------

    def add(self, h: int, worker: str) -> bool:
        i = self._stripe(h)
        self._locks[i].acquire()  # leak: the return for a known worker keeps the stripe locked
        owners = self._maps[i].setdefault(h, set())
        if worker in owners:
            return False
        owners.add(worker)
        self._locks[i].release()
        return True

    def lookup(self, h: int) -> Set[str]:
        i = self._stripe(h)
        lock = self._locks[i]
        lock.acquire()  # clean: near miss, both returns pass the finally
        try:
            owners = self._maps[i].get(h)
            if owners is None:
                return set()
            return set(owners)
        finally:
            lock.release()

    def try_add(self, h: int, worker: str, timeout: float = 0.01) -> bool:
        i = self._stripe(h)
        if not self._locks[i].acquire(timeout=timeout):  # clean: near miss, nothing is held when it times out
            return False
        self._maps[i].setdefault(h, set()).add(worker)
        self._locks[i].release()
        return True

    def move(self, src: int, dst: int) -> bool:
        a, b = sorted((self._stripe(src), self._stripe(dst)))
        self._locks[a].acquire()  # leak: a second stripe that times out leaves the first one locked
        if a != b and not self._locks[b].acquire(timeout=0.05):  # clean: near miss, released under the same a != b
            return False
        owners = self._maps[self._stripe(src)].pop(src, None)
        if owners is not None:
            self._maps[self._stripe(dst)][dst] = owners
        if a != b:
            self._locks[b].release()
        self._locks[a].release()
        return owners is not None

    def purge(self, worker: str) -> int:
        n = 0
        for lock, table in zip(self._locks, self._maps):
            if not lock.acquire(blocking=False):  # leak: continue for an empty stripe keeps its lock
                continue
            if not table:
                continue
            for owners in table.values():
                n += worker in owners
                owners.discard(worker)
            lock.release()
        return n

    def snapshot(self) -> Dict[int, List[str]]:
        for lock in self._locks:
            lock.acquire()  # clean: near miss, the second loop releases every stripe
        try:
            return {h: sorted(o) for table in self._maps for h, o in table.items()}
        finally:
            for lock in self._locks:
                lock.release()

    # -- membership ----------------------------------------------------

    def join(self, worker: str) -> None:
        with WriteGuard(self._rw):  # clean: without on_error the guard unlocks
            self._workers.add(worker)

    def rename(self, old: str, new: str) -> None:
        with WriteGuard(self._rw, on_error=lambda e: logger.warning("rename: %r", e)):  # clean: with, the fault is the guard's own
            self._workers.remove(old)
            self._workers.add(new)

    def alive(self, worker: str) -> bool:
        self._rw.read_lock()  # clean: released before the return
        found = worker in self._workers
        self._rw.read_unlock()
        return found

    def pick(self, h: int) -> Optional[str]:
        self._rw.read_lock()  # leak: no owner in the pool, returns None still holding the read lock
        owners = self.lookup(h) & self._workers
        if not owners:
            return None
        chosen = min(owners)
        self._rw.read_unlock()
        return chosen

    def pick_any(self, hashes: Iterable[int]) -> Optional[str]:
        with ReadGuard(self._rw):  # clean: with
            for h in hashes:
                owners = self.lookup(h) & self._workers
                if owners:
                    return min(owners)
        return None

    def leave(self, worker: str) -> bool:
        if not self._rw.write_lock(timeout=1.0):  # leak: a KeyError is survived without write_unlock
            return False
        try:
            self._workers.remove(worker)
            self._rw.write_unlock()
        except KeyError:
            logger.info("%s is not a member", worker)
            return False
        return True

    def rebuild(self, workers: Iterable[str]) -> bool:
        locked = self._rw.write_lock(timeout=1.0)  # clean: near miss, locked guards the unlock
        try:
            if locked:
                self._workers = set(workers)
        finally:
            if locked:
                self._rw.write_unlock()
        return locked
