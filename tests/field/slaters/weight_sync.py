"""Trainer-to-sampler weight synchronisation: versioned snapshots, rank locks, port leases."""
from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import Callable, Dict, Iterator, List, Optional

log = logging.getLogger("rl.weights")


class PortRange:
    def __init__(self, first: int, count: int) -> None:
        self._ports = list(range(first, first + count))
        self._in_use: set = set()

    def reserve_port(self) -> Optional[int]:
        for p in self._ports:
            if p not in self._in_use:
                self._in_use.add(p)
                return p
        return None

    def unreserve_port(self, port: int) -> None:
        self._in_use.discard(port)

    def used(self) -> int:
        return len(self._in_use)


class Snapshot:
    def __init__(self, version: int, weights: Dict[str, float]) -> None:
        self.version = version
        self.weights = weights
        self.pins = 0


class SnapshotStore:
    """Snapshots stay while they are pinned; unpinned ones but the newest are collected."""

    def __init__(self) -> None:
        self._mu = threading.RLock()
        self._by_version: Dict[int, Snapshot] = {}
        self.newest = -1

    def publish(self, version: int, weights: Dict[str, float]) -> bool:
        self._mu.acquire()  # leak: stale versions return with the lock held
        if version <= self.newest:
            log.info("version %d is stale", version)
            return False
        self._by_version[version] = Snapshot(version, weights)
        self.newest = version
        self.collect()
        self._mu.release()
        return True

    def pin(self, version: Optional[int] = None) -> Optional[Snapshot]:
        with self._mu:
            snap = self._by_version.get(self.newest if version is None else version)
            if snap is not None:
                snap.pins += 1
            return snap

    def unpin(self, snap: Snapshot) -> None:
        with self._mu:
            snap.pins -= 1
            self.collect()

    def collect(self) -> int:
        if not self._mu.acquire(timeout=1.0):  # clean: near miss, a failed try takes nothing, else released in finally
            return 0
        try:
            dead = [v for v, s in self._by_version.items() if s.pins == 0 and v != self.newest]
            for v in dead:
                del self._by_version[v]
            return len(dead)
        finally:
            self._mu.release()


class Sampler:
    """Serves one version; upgrades between batches."""

    def __init__(self, store: SnapshotStore) -> None:
        self.store = store
        self.current: Optional[Snapshot] = None

    def upgrade(self) -> bool:
        snap = self.store.pin()  # leak: the version it already serves gets another pin and returns False
        if snap is None:
            return False
        if self.current is not None and snap.version == self.current.version:
            return False
        old, self.current = self.current, snap
        if old is not None:
            self.store.unpin(old)
        return True

    def stop(self) -> None:
        if self.current is not None:
            self.store.unpin(self.current)
            self.current = None


class ShadowSampler(Sampler):
    def upgrade(self) -> bool:
        snap = self.store.pin()  # clean: near miss, unpinned when unchanged, else kept and unpinned by stop
        if snap is None:
            return False
        if snap is self.current:
            self.store.unpin(snap)
            return False
        self.stop()
        self.current = snap
        return True


class RankLocks:
    def __init__(self, world: int) -> None:
        self._locks = [threading.Lock() for _ in range(world)]

    @contextmanager
    def all_ranks(self) -> Iterator[None]:
        held: List[threading.Lock] = []
        try:
            for lk in self._locks:
                lk.acquire()  # clean: every held one is released in finally
                held.append(lk)
            yield
        finally:
            for lk in reversed(held):
                lk.release()

    def try_pair(self, a: int, b: int, fn: Callable[[], None]) -> bool:
        if not self._locks[a].acquire(blocking=False):  # leak: the second lock's failure returns with this one held
            return False
        if not self._locks[b].acquire(blocking=False):  # clean: released after the call
            return False
        fn()
        self._locks[b].release()
        self._locks[a].release()
        return True


def connect(ports: PortRange, dial: Callable[[int], bool], attempts: int = 4) -> Optional[int]:
    """A port with a peer behind it; the caller unreserves it."""
    rejected: List[int] = []
    found: Optional[int] = None
    for _ in range(attempts):
        port = ports.reserve_port()  # clean: near miss, rejected ones are given back after the loop, the good one is returned
        if port is None:
            break
        if dial(port):
            found = port
            break
        rejected.append(port)
    for p in rejected:
        ports.unreserve_port(p)
    return found


def sync_once(ports: PortRange, store: SnapshotStore, dial: Callable[[int], bool], send: Callable[[int, Snapshot], None]) -> bool:
    port = connect(ports, dial)  # leak: no snapshot yet means return with the port reserved
    if port is None:
        return False
    snap = store.pin()  # clean: unpinned in finally
    if snap is None:
        return False
    try:
        send(port, snap)
        return True
    finally:
        store.unpin(snap)
        ports.unreserve_port(port)


def main() -> None:
    store = SnapshotStore()
    ports = PortRange(5000, 4)
    sampler, shadow = Sampler(store), ShadowSampler(store)
    for v in range(3):
        store.publish(v, {"w": float(v)})
        sampler.upgrade()
        shadow.upgrade()
    sent: List[int] = []
    print(sync_once(ports, store, lambda p: p > 5001, lambda p, s: sent.append(s.version)), sent)
    sampler.stop()
    shadow.stop()
    locks = RankLocks(2)
    with locks.all_ranks():  # clean: with
        pass
    print(locks.try_pair(0, 1, lambda: None), ports.used(), store.collect())


if __name__ == "__main__":
    main()
