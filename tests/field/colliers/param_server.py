"""Async parameter shards with hand-rolled locking (actor side of the RL loop)."""
from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Callable, Optional

log = logging.getLogger("pshard")


class StaleVersion(Exception):
    pass


@dataclass
class Snapshot:
    version: int
    data: bytes
    users: int = 0


class RWGate:
    """Many readers or one writer."""

    def __init__(self) -> None:
        self._cv = threading.Condition()
        self._readers = 0
        self._writer = False

    def enter_read(self) -> None:
        with self._cv:
            self._cv.wait_for(lambda: not self._writer)
            self._readers += 1

    def leave_read(self) -> None:
        with self._cv:
            self._readers -= 1
            self._cv.notify_all()

    def enter_write(self, timeout: Optional[float] = None) -> bool:
        with self._cv:
            if not self._cv.wait_for(lambda: not self._writer and not self._readers, timeout):
                return False
            self._writer = True
            return True

    def leave_write(self) -> None:
        with self._cv:
            self._writer = False
            self._cv.notify_all()

    def busy(self) -> bool:
        return self._writer or self._readers > 0


@dataclass
class Shard:
    name: str
    data: bytearray
    version: int = 0
    mu: threading.Lock = field(default_factory=threading.Lock)
    gate: RWGate = field(default_factory=RWGate)
    grads: list[bytes] = field(default_factory=list)


class SnapshotTable:
    def __init__(self) -> None:
        self._mu = threading.Lock()
        self.snaps: dict[int, Snapshot] = {}

    def publish(self, version: int, data: bytes) -> None:
        with self._mu:
            self.snaps[version] = Snapshot(version, data)

    def retain(self, version: int) -> Optional[Snapshot]:
        with self._mu:
            s = self.snaps.get(version)
            if s is not None:
                s.users += 1
            return s

    def drop(self, s: Snapshot) -> None:
        with self._mu:
            s.users -= 1

    def gc(self, newest: int) -> int:
        with self._mu:
            dead = [v for v, s in self.snaps.items() if v < newest and s.users == 0]
            for v in dead:
                del self.snaps[v]
            return len(dead)


class ShardServer:
    def __init__(self, shards: list[Shard]) -> None:
        self.shards = {s.name: s for s in shards}
        self.snaps = SnapshotTable()
        self.actors: dict[str, Snapshot] = {}
        self.viewers: dict[str, Snapshot] = {}
        self.publish_mu = threading.Lock()

    def push(self, name: str, grad: bytes, version: int, max_stale: int = 4) -> bool:
        s = self.shards[name]
        s.mu.acquire()  # leak: a stale gradient returns with the lock held
        if s.version - version > max_stale:
            log.info("stale grad for %s", name)
            return False
        s.grads.append(grad)
        s.mu.release()
        return True

    def apply(self, name: str, lr: int) -> int:
        s = self.shards[name]
        s.mu.acquire()  # clean: near miss, early return inside the try
        try:
            if not s.grads:
                return s.version
            for g in s.grads:
                for i, x in enumerate(g):
                    s.data[i] = (s.data[i] - lr * x) & 0xFF
            s.grads.clear()
            s.version += 1
            return s.version
        finally:
            s.mu.release()

    def try_apply_all(self, lr: int) -> int:
        n = 0
        for s in self.shards.values():
            if not s.mu.acquire(blocking=False):  # leak: a shard without gradients continues with the lock held
                continue
            if not s.grads:
                continue
            for g in s.grads:
                s.data[0] = (s.data[0] - lr * g[0]) & 0xFF
            s.grads.clear()
            s.version += 1
            n += 1
            s.mu.release()
        return n

    def read_if_newer(self, name: str, have: int) -> Optional[bytes]:
        s = self.shards[name]
        s.gate.enter_read()  # leak: an up-to-date caller gets None with the gate still entered
        if s.version <= have:
            return None
        out = bytes(s.data)
        s.gate.leave_read()
        return out

    def load(self, name: str, blob: bytes, timeout: float = 1.0) -> bool:
        s = self.shards[name]
        if not s.gate.enter_write(timeout):  # clean: near miss, a timeout takes nothing and success is left in the finally
            return False
        try:
            s.data[:] = blob
            s.version += 1
        finally:
            s.gate.leave_write()
        return True

    def freeze(self) -> list[Shard]:
        """All write gates, name order; undone by thaw."""
        held: list[Shard] = []
        for name in sorted(self.shards):
            s = self.shards[name]
            if not s.gate.enter_write(0.05):  # clean: near miss, the ones held are thawed on a timeout, else returned
                self.thaw(held)
                return []
            held.append(s)
        return held

    def thaw(self, held: list[Shard]) -> None:
        for s in reversed(held):
            s.gate.leave_write()

    def export(self) -> Optional[dict[str, bytes]]:
        held = self.freeze()  # clean: thawed in the finally
        if not held:
            return None
        try:
            return {s.name: bytes(s.data) for s in held}
        finally:
            self.thaw(held)

    def rename_all(self, prefix: str) -> bool:
        held = self.freeze()  # leak: a prefix that is already there returns without thaw
        if not held or any(s.name.startswith(prefix) for s in held):
            return False
        self.shards = {prefix + s.name: s for s in held}
        for s in held:
            s.name = prefix + s.name
        self.thaw(held)
        return True

    # -- snapshots ----------------------------------------------------------
    def watch(self, viewer: str, version: int) -> bool:
        s = self.snaps.retain(version)  # leak: the viewer's earlier snapshot is overwritten, its count stays up
        if s is None:
            return False
        self.viewers[viewer] = s
        return True

    def unwatch(self, viewer: str) -> None:
        s = self.viewers.pop(viewer, None)
        if s is not None:
            self.snaps.drop(s)

    def move(self, actor: str, version: int) -> bool:
        s = self.snaps.retain(version)  # clean: near miss, the earlier one is dropped after the swap
        if s is None:
            return False
        old = self.actors.get(actor)
        self.actors[actor] = s
        if old is not None:
            self.snaps.drop(old)
        return True

    def detach(self, actor: str) -> None:
        s = self.actors.pop(actor, None)
        if s is not None:
            self.snaps.drop(s)

    def publish(self, fn: Callable[[], bytes]) -> int:
        locked = self.publish_mu.acquire(timeout=0.1)  # clean: near miss, released under the flag that acquire gave
        try:
            v = max(self.snaps.snaps, default=0) + 1
            if locked:
                self.snaps.publish(v, fn())
            return v if locked else -1
        finally:
            if locked:
                self.publish_mu.release()

    def poll_publish(self, tries: int, fn: Callable[[], bytes]) -> int:
        for _ in range(tries):
            if not self.publish_mu.acquire(blocking=False):  # leak: a StaleVersion is swallowed and the next try finds its own lock
                time.sleep(0.001)
                continue
            try:
                data = fn()
            except StaleVersion:
                continue
            v = max(self.snaps.snaps, default=0) + 1
            self.snaps.publish(v, data)
            self.publish_mu.release()
            return v
        return -1


if __name__ == "__main__":
    srv = ShardServer([Shard("a", bytearray(4)), Shard("b", bytearray(4))])
    assert srv.push("a", b"\x01\x00\x00\x00", 0)
    print(srv.apply("a", 1), srv.load("b", b"1234"))
    srv.publish(lambda: b"x"); srv.publish(lambda: b"y")
    srv.move("act0", 1); srv.move("act0", 2); srv.detach("act0")
    print(srv.export(), srv.snaps.gc(2), any(s.gate.busy() for s in srv.shards.values()))
