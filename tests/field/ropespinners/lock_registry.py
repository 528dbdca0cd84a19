"""Named locks and leases for a job controller: counted entries in a registry, with worker tasks that carry their leases."""
from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Sequence

log = logging.getLogger("locks")
_serial = itertools.count(1)


class _Entry:
    __slots__ = ("lock", "count")

    def __init__(self):
        self.lock = threading.Lock()
        self.count = 0


class KeyedLocks:
    """One lock for each key; the entry lives as long as somebody is interested."""

    def __init__(self):
        self._entries: Dict[str, _Entry] = {}
        self._mu = threading.Lock()

    def _intern(self, key: str) -> _Entry:
        with self._mu:
            e = self._entries.setdefault(key, _Entry())
            e.count += 1
            return e

    def _outern(self, key: str) -> None:
        with self._mu:
            e = self._entries[key]
            e.count -= 1
            if e.count == 0:
                del self._entries[key]

    def grab(self, key: str, timeout: float = -1) -> bool:
        e = self._intern(key)  # leak: a timeout returns False without _outern, so the count never falls to zero
        if not e.lock.acquire(timeout=timeout):  # clean: False means that nothing was locked, loose() unlocks the rest
            return False
        return True

    def loose(self, key: str) -> None:
        with self._mu:
            e = self._entries[key]
        e.lock.release()
        self._outern(key)


class Held:
    """Several keys at once, taken in sorted order."""

    def __init__(self, locks: KeyedLocks, keys: Sequence[str], timeout: float = 5.0):
        self.locks = locks
        self.keys = sorted(set(keys))
        self.timeout = timeout
        self._got: List[str] = []

    def __enter__(self) -> bool:
        for k in self.keys:
            if not self.locks.grab(k, self.timeout):  # clean: near miss, __exit__ looses what _got holds, also after a partial enter
                return False
            self._got.append(k)
        return True

    def __exit__(self, *exc) -> None:
        while self._got:
            self.locks.loose(self._got.pop())


@dataclass
class Lease:
    serial: int
    slot: int
    until: float
    notes: Dict[str, Any] = field(default_factory=dict)


class GpuSlots:
    """Slots of a node, kept as a bitmask."""

    def __init__(self, n: int):
        self.n = n
        self._mask = 0
        self._mu = threading.Lock()

    def assign(self, ttl: float) -> Optional[Lease]:
        with self._mu:
            for i in range(self.n):
                if not self._mask >> i & 1:
                    self._mask |= 1 << i
                    return Lease(next(_serial), i, time.monotonic() + ttl)
        return None

    def revoke(self, lease: Lease) -> None:
        with self._mu:
            self._mask &= ~(1 << lease.slot)


class Controller:
    def __init__(self, slots: GpuSlots, locks: KeyedLocks):
        self.slots = slots
        self.locks = locks
        self.running: Dict[str, Lease] = {}
        self.tasks: Dict[str, asyncio.Task] = {}

    def place(self, job: str, ttl: float) -> bool:
        lease = self.slots.assign(ttl)  # leak: a job that runs already is refused with the new lease assigned
        if lease is None:
            return False
        if job in self.running:
            log.info("%s runs already", job)
            return False
        self.running[job] = lease
        return True

    def extend(self, job: str, ttl: float) -> bool:
        old = self.running.get(job)
        if old is None:
            return False
        old.until = time.monotonic() + ttl
        return True

    def migrate(self, job: str, ttl: float, move: Callable[[int, int], bool]) -> bool:
        old = self.running.get(job)
        if old is None:
            return False
        new = self.slots.assign(ttl)  # clean: near miss, whichever of old and new loses is revoked
        if new is None:
            return False
        loser = old
        if move(old.slot, new.slot):
            self.running[job] = new
        else:
            loser = new
        self.slots.revoke(loser)
        return loser is old

    def finish(self, job: str) -> None:
        lease = self.running.pop(job, None)
        if lease is not None:
            self.slots.revoke(lease)

    def reap(self) -> List[str]:
        now = time.monotonic()
        late = [j for j, l in self.running.items() if l.until < now]
        for j in late:
            self.finish(j)
        return late

    def launch(self, job: str, body: Callable[[int], Any]) -> bool:
        lease = self.slots.assign(3600.0)  # clean: the task's done callback revokes it
        if lease is None:
            return False
        task = asyncio.ensure_future(body(lease.slot))
        task.add_done_callback(lambda _t, lease=lease: self.slots.revoke(lease))
        self.tasks[job] = task
        return True

    async def run_pair(self, first: Callable[[int], Any], second: Callable[[int], Any]) -> bool:
        a = self.slots.assign(600.0)  # leak: when there is no slot for b, a stays assigned
        if a is None:
            return False
        b = self.slots.assign(600.0)  # clean: revoked in finally
        if b is None:
            return False
        try:
            await asyncio.gather(first(a.slot), second(b.slot))
            return True
        finally:
            self.slots.revoke(a)
            self.slots.revoke(b)

    def rename(self, job: str, new_name: str) -> bool:
        if not self.locks.grab(job, 1.0):  # leak: an unknown job, or a name in use, returns with the key grabbed
            return False
        if job not in self.running or new_name in self.running:
            return False
        self.running[new_name] = self.running.pop(job)
        self.locks.loose(job)
        return True

    def swap(self, a: str, b: str) -> bool:
        with Held(self.locks, [a, b]) as ok:  # clean: with
            if not ok or a not in self.running or b not in self.running:
                return False
            self.running[a], self.running[b] = self.running[b], self.running[a]
            return True

    def drain(self, keep: Callable[[str], bool]) -> int:
        kept: Dict[str, Lease] = {}
        gone = 0
        for job, lease in self.running.items():
            if keep(job):
                kept[job] = lease
            else:
                self.slots.revoke(lease)
                gone += 1
        self.running = kept
        return gone


def wait_for_slot(slots: GpuSlots, want: Callable[[int], bool], deadline: float) -> Optional[Lease]:
    """Polls until a slot that suits comes up."""
    lease: Optional[Lease] = None
    while time.monotonic() < deadline:
        lease = slots.assign(60.0)  # leak: an unsuitable slot is not revoked before the next poll
        if lease is not None and want(lease.slot):
            return lease
        time.sleep(0.05)
    return None
