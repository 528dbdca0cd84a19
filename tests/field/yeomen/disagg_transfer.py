"""KV transfer between prefill and decode instances over RDMA.

The prefill side registers its KV pages, sends the keys to the decode side, and
that one reads them.  Completions come in on a thread and run callbacks.
"""
from __future__ import annotations

import itertools
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional

logger = logging.getLogger("kvxfer")


class RegistrationError(RuntimeError):
    """The NIC has no more translation entries."""


class NoCredits(RuntimeError):
    pass


@dataclass
class MemoryRegion:
    addr: int
    length: int
    rkey: int
    handle: Any


class Nic:
    def __init__(self, verbs, max_regions: int):
        self.verbs = verbs
        self.max_regions = max_regions
        self._regions: Dict[int, MemoryRegion] = {}
        self._lock = threading.Lock()

    def register(self, addr: int, length: int) -> MemoryRegion:
        with self._lock:
            if len(self._regions) >= self.max_regions:
                raise RegistrationError(f"{self.max_regions} regions registered")
            handle = self.verbs.reg_mr(addr, length)  # clean: goes into the region that is returned
            mr = MemoryRegion(addr, length, handle.rkey, handle)
            self._regions[mr.rkey] = mr
            return mr

    def deregister(self, mr: MemoryRegion) -> None:
        with self._lock:
            self._regions.pop(mr.rkey)
            self.verbs.dereg_mr(mr.handle)


class CompletionSlots:
    def __init__(self, n: int):
        self._free = list(range(n))
        self._waiting: Dict[int, Callable[[int], None]] = {}
        self._lock = threading.Lock()

    def obtain(self) -> int:
        with self._lock:
            if not self._free:
                raise NoCredits("completion slots")
            return self._free.pop()  # clean: goes to the caller

    def expect(self, slot: int, fn: Callable[[int], None]) -> None:
        with self._lock:
            self._waiting[slot] = fn

    def relinquish(self, slot: int) -> None:
        with self._lock:
            self._waiting.pop(slot, None)
            self._free.append(slot)

    def complete(self, slot: int, status: int) -> None:
        with self._lock:
            fn = self._waiting.pop(slot, None)
        if fn is not None:
            fn(status)


class Credits:
    def __init__(self, n: int):
        self._sem = threading.Semaphore(n)

    def take(self, timeout: float) -> bool:
        return self._sem.acquire(timeout=timeout)  # clean: goes to the caller, who sees whether there was one

    def grant(self) -> None:
        self._sem.release()


@dataclass
class Peer:
    name: str
    credits: Credits
    alive: bool = True
    bytes_moved: int = 0


class Offer:
    """Prefill side: pages that a peer may read until it says that it is done."""

    def __init__(self, nic: Nic, slots: CompletionSlots, rid: str, pages: List[tuple]):
        self.nic = nic
        self.slots = slots
        self.rid = rid
        self.regions: List[MemoryRegion] = []
        self.slot = slots.obtain()  # leak: withdraw() deregisters the regions and never relinquishes the slot
        try:
            for addr, length in pages:
                self.regions.append(nic.register(addr, length))  # clean: near miss, withdraw() deregisters, here too when one is refused
        except RegistrationError:
            self.withdraw()
            raise

    def manifest(self) -> dict:
        return {
            "rid": self.rid,
            "slot": self.slot,
            "pages": [(m.addr, m.length, m.rkey) for m in self.regions],
        }

    def withdraw(self) -> None:
        while self.regions:
            self.nic.deregister(self.regions.pop())


@dataclass
class Pull:
    rid: str
    peer: Peer
    target: MemoryRegion
    slot: int
    started: float = field(default_factory=time.monotonic)
    status: Optional[int] = None


class PrefillNode:
    def __init__(self, nic: Nic, slots: CompletionSlots, bus, ttl: float = 30.0):
        self.nic = nic
        self.slots = slots
        self.bus = bus
        self.ttl = ttl
        self.offers: Dict[str, Offer] = {}
        self.deadlines: Dict[str, float] = {}

    def publish(self, rid: str, pages: List[tuple], peer: Peer) -> bool:
        if rid in self.offers:
            return True
        try:
            offer = Offer(self.nic, self.slots, rid, pages)  # leak: expire() deletes an old offer from the table without withdrawing it
        except (RegistrationError, NoCredits) as exc:
            logger.warning("no offer for %s: %s", rid, exc)
            return False
        self.offers[rid] = offer
        self.deadlines[rid] = time.monotonic() + self.ttl
        self.bus.send(peer.name, offer.manifest())
        return True

    def acknowledged(self, rid: str) -> None:
        offer = self.offers.pop(rid, None)
        self.deadlines.pop(rid, None)
        if offer is not None:
            offer.withdraw()

    def expire(self) -> int:
        now = time.monotonic()
        old = [rid for rid, at in self.deadlines.items() if at < now]
        for rid in old:
            del self.offers[rid], self.deadlines[rid]
        return len(old)

    def heartbeat(self, peers: List[Peer]) -> List[str]:
        """Names of the peers that can be posted to."""
        usable = []
        for peer in peers:
            if not peer.credits.take(timeout=0.01):  # clean: near miss, not taken on this path and granted in the next line but one
                continue
            peer.credits.grant()
            usable.append(peer.name)
        return usable


class DecodeNode:
    def __init__(self, nic: Nic, slots: CompletionSlots, qp, on_arrived: Callable[[str], None]):
        self.nic = nic
        self.slots = slots
        self.qp = qp
        self.on_arrived = on_arrived
        self.pulls: Dict[str, Pull] = {}
        self._wr = itertools.count()

    def pull(self, manifest: dict, peer: Peer, addr: int) -> bool:
        rid = manifest["rid"]
        if not peer.credits.take(timeout=1.0):  # leak: a peer that has died returns here, and a failed completion grants nothing
            return False
        if not peer.alive:
            logger.info("%s is gone", peer.name)
            return False
        total = sum(length for _, length, _ in manifest["pages"])
        try:
            target = self.nic.register(addr, total)  # leak: NoCredits of obtain() is handled without deregistering it
            slot = self.slots.obtain()  # clean: near miss, both branches of _landed relinquish it
        except (RegistrationError, NoCredits) as exc:
            logger.warning("%s: %s", rid, exc)
            peer.credits.grant()
            return False
        job = Pull(rid, peer, target, slot)
        self.pulls[rid] = job
        self.slots.expect(slot, lambda status: self._landed(job, status))
        self.qp.post_read(next(self._wr), manifest["pages"], target.addr, target.rkey, slot)
        return True

    def _landed(self, job: Pull, status: int) -> None:
        job.status = status
        self.pulls.pop(job.rid, None)
        self.slots.relinquish(job.slot)
        self.nic.deregister(job.target)
        if status != 0:
            logger.error("read of %s failed with %d", job.rid, status)
            return
        job.peer.bytes_moved += job.target.length
        job.peer.credits.grant()
        self.on_arrived(job.rid)

    def ping(self, peer: Peer, addr: int) -> Optional[float]:
        """Latency of a read of 8 bytes."""
        slot = self.slots.obtain()  # clean: relinquished in the outer finally even when no region can be had
        try:
            try:
                mr = self.nic.register(addr, 8)  # clean: deregistered in the inner finally
            except RegistrationError:
                return None
            seen = threading.Event()
            try:
                self.slots.expect(slot, lambda _status: seen.set())
                t0 = time.perf_counter()
                self.qp.post_read(next(self._wr), [(0, 8, 0)], mr.addr, mr.rkey, slot)
                return time.perf_counter() - t0 if seen.wait(1.0) else None
            finally:
                self.nic.deregister(mr)
        finally:
            self.slots.relinquish(slot)


def calibrate(nic: Nic, base: int, sizes: List[int]) -> Dict[int, float]:
    """Seconds that registering takes, by size."""
    out: Dict[int, float] = {}
    last = None
    for size in sizes:
        t0 = time.perf_counter()
        last = nic.register(base, size)  # leak: last is bound anew in each round and only the final one is deregistered
        out[size] = time.perf_counter() - t0
    if last is not None:
        nic.deregister(last)
    return out
