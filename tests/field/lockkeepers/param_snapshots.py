"""Parameter server: published weight snapshots with reference counts."""
from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any, Callable, Optional

log = logging.getLogger("param_server")


@dataclass
class Snapshot:
    version: int
    weights: dict
    refs: int = 0
    published_at: float = 0.0


class SnapshotStore:
    """retain_latest() and retain() count a reader in, drop() counts it out."""

    def __init__(self, keep: int = 4) -> None:
        self._by_version: dict[int, Snapshot] = {}
        self._keep = keep
        self._lock = threading.Lock()

    def publish(self, version: int, weights: dict) -> None:
        with self._lock:
            self._by_version[version] = Snapshot(version, weights, 0, time.time())
            for old in sorted(self._by_version)[: -self._keep]:
                if self._by_version[old].refs == 0:
                    del self._by_version[old]

    def retain(self, version: int) -> Optional[Snapshot]:
        with self._lock:
            snap = self._by_version.get(version)
            if snap is not None:
                snap.refs += 1
            return snap

    def retain_latest(self) -> Snapshot:
        with self._lock:
            snap = self._by_version[max(self._by_version)]
            snap.refs += 1
            return snap

    def drop(self, snap: Snapshot) -> None:
        with self._lock:
            snap.refs -= 1


class PolicyClient:
    """What an inference worker holds: the snapshot it serves from."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store
        self._current: Optional[Snapshot] = None

    def refresh(self) -> bool:
        fresh = self._store.retain_latest()  # clean: near miss, either it or the one it replaces is dropped
        if self._current is not None:
            if fresh.version == self._current.version:
                self._store.drop(fresh)
                return False
            self._store.drop(self._current)
        self._current = fresh
        return True

    def act(self, obs: list) -> float:
        if self._current is None:
            return 0.0
        bias = self._current.weights.get("bias", 0.0)
        return sum(obs) + bias

    def shutdown(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            self._store.drop(current)


class LazyPolicyClient:
    """Same contract as PolicyClient, polls at most once a second."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store
        self._current: Optional[Snapshot] = None
        self._polled = 0.0

    def refresh(self) -> bool:
        now = time.monotonic()
        if now - self._polled < 1.0:
            return False
        self._polled = now
        fresh = self._store.retain_latest()  # leak: an unchanged version returns with the extra reference
        if self._current is not None and fresh.version == self._current.version:
            return False
        if self._current is not None:
            self._store.drop(self._current)
        self._current = fresh
        return True

    def shutdown(self) -> None:
        if self._current is not None:
            self._store.drop(self._current)
            self._current = None


def drift(store: SnapshotStore, old_version: int) -> float:
    new = store.retain_latest()  # leak: returns inf with this one held when the old version is gone
    old = store.retain(old_version)  # clean: dropped below when it exists
    if old is None:
        log.info("version %d is gone", old_version)
        return float("inf")
    total = 0.0
    for key, value in new.weights.items():
        total += abs(value - old.weights.get(key, 0.0))
    store.drop(old)
    store.drop(new)
    return total


def first_common(store: SnapshotStore, versions: list, key: str) -> Optional[int]:
    for version in versions:
        snap = store.retain(version)  # leak: the hit returns the number before the drop
        if snap is None:
            continue
        if key in snap.weights:
            return snap.version
        store.drop(snap)
    return None


def await_version(store: SnapshotStore, at_least: int, timeout: float) -> Optional[Snapshot]:
    """Answers a retained snapshot; the caller drops it."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        snap = store.retain_latest()  # clean: near miss, handed on or dropped before the next try
        if snap.version >= at_least:
            return snap
        store.drop(snap)
        time.sleep(0.05)
    return None


def evaluate_when_ready(
    store: SnapshotStore, at_least: int, score: Callable[[dict], float]
) -> Optional[float]:
    snap = await_version(store, at_least, 30.0)  # clean: dropped when there is one
    if snap is None:
        return None
    try:
        return score(snap.weights)
    finally:
        store.drop(snap)


class Subscription:
    def __init__(self, name: str, snap: Snapshot, push: Callable[[dict], None]) -> None:
        self.name = name
        self.snap = snap
        self.push = push


class Broadcaster:
    """Subscribers hold the snapshot they were last sent."""

    def __init__(self, store: SnapshotStore) -> None:
        self.store = store
        self._subs: dict[str, Subscription] = {}

    def subscribe(self, name: str, push: Callable[[dict], None]) -> None:
        if name in self._subs:
            return
        snap = self.store.retain_latest()  # clean: unsubscribe() drops the subscription's snapshot
        self._subs[name] = Subscription(name, snap, push)
        push(snap.weights)

    def unsubscribe(self, name: str) -> None:
        sub = self._subs.pop(name, None)
        if sub is None:
            return
        self.store.drop(sub.snap)

    def advance(self) -> int:
        sent = 0
        for sub in self._subs.values():
            fresh = self.store.retain_latest()  # clean: near miss, the replaced snapshot is dropped
            stale, sub.snap = sub.snap, fresh
            self.store.drop(stale)
            sub.push(fresh.weights)
            sent += 1
        return sent


class Follower:
    """A single reader that follows the head, e.g. the evaluation job."""

    def __init__(self, store: SnapshotStore) -> None:
        self.store = store
        self.snap: Optional[Snapshot] = None
        self.moves = 0

    def follow(self) -> dict:
        self.snap = self.store.retain_latest()  # leak: the snapshot of the last call is overwritten undropped
        self.moves += 1
        return dict(self.snap.weights)

    def close(self) -> None:
        if self.snap is not None:
            self.store.drop(self.snap)
        self.snap = None


class GradientWindow:
    """Gradients refer to the snapshot they were computed on until they are applied."""

    def __init__(self, store: SnapshotStore, max_lag: int) -> None:
        self.store, self.max_lag = store, max_lag
        self._pending: list[tuple[Snapshot, dict[str, Any]]] = []

    def offer(self, version: int, grad: dict) -> bool:
        snap = self.store.retain(version)  # leak: apply() throws away those that lag without a drop
        if snap is None:
            return False
        self._pending.append((snap, grad))
        return True

    def apply(self, head: int) -> dict:
        total: dict[str, float] = {}
        while self._pending:
            snap, grad = self._pending.pop()
            if head - snap.version > self.max_lag:
                log.info("gradient of version %d is too old", snap.version)
                continue
            for key, value in grad.items():
                total[key] = total.get(key, 0.0) + value
            self.store.drop(snap)
        return total


class GradientQueue:
    """First in, first out; one gradient at a time."""

    def __init__(self, store: SnapshotStore) -> None:
        self.store = store
        self._queue: list[tuple[Snapshot, dict]] = []

    def offer(self, version: int, grad: dict) -> bool:
        snap = self.store.retain(version)  # clean: step() drops whether the gradient is used or not
        if snap is None:
            return False
        self._queue.append((snap, grad))
        return True

    def step(self, head: int) -> dict:
        if not self._queue:
            return {}
        snap, grad = self._queue.pop(0)
        fresh = head - snap.version <= 2
        self.store.drop(snap)
        return grad if fresh else {}
