"""Sender side of a credit-based RDMA channel for parameter and gradient traffic.

Each peer grants a number of credits.  A send takes a credit and a registered
region; completions give both back.  The completion thread calls `on_completion`.
"""
from __future__ import annotations

import itertools
import logging
import threading
import time
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Protocol, Sequence

log = logging.getLogger("rdma")


class QueuePair(Protocol):
    def post(self, wr_id: int, addr: int, nbytes: int, remote: int) -> int: ...

    def alive(self) -> bool: ...


class RegionTable:
    """Registered memory as equal regions; `head` threads the idle ones together."""

    NIL = -1

    def __init__(self, base: int, region_bytes: int, n: int) -> None:
        self.base = base
        self.region_bytes = region_bytes
        self._next = list(range(1, n)) + [self.NIL]
        self._head = 0 if n else self.NIL
        self._mu = threading.Lock()
        self.idle = n

    def reserve(self) -> int:
        with self._mu:
            r = self._head
            if r == self.NIL:
                return self.NIL
            self._head = self._next[r]
            self.idle -= 1
            return r

    def unreserve(self, r: int) -> None:
        with self._mu:
            self._next[r] = self._head
            self._head = r
            self.idle += 1

    def addr(self, r: int) -> int:
        return self.base + r * self.region_bytes


class Credits:
    def __init__(self, n: int) -> None:
        self._n = n
        self._cv = threading.Condition()

    def debit(self, timeout: Optional[float] = None) -> bool:
        with self._cv:
            if not self._cv.wait_for(lambda: self._n > 0, timeout):
                return False
            self._n -= 1
            return True

    def credit(self, k: int = 1) -> None:
        with self._cv:
            self._n += k
            self._cv.notify(k)


@dataclass
class Outstanding:
    region: int
    remote: int
    nbytes: int
    done: Optional[Callable[[int], None]] = None


class Sender:
    def __init__(self, qp: QueuePair, regions: RegionTable, credits: Credits, write: Callable[[int, bytes], None]) -> None:
        self.qp = qp
        self.regions = regions
        self.credits = credits
        self.write = write
        self._ids = itertools.count(1)
        self._out: Dict[int, Outstanding] = {}
        self._setup = threading.Lock()

    def send(self, payload: bytes, remote: int, done: Optional[Callable[[int], None]] = None) -> bool:
        if not self.credits.debit(timeout=1.0):  # clean: near miss, credited on each failure, else by on_completion()
            return False
        r = self.regions.reserve()  # clean: moved into _out, which on_completion() empties
        if r == RegionTable.NIL:
            self.credits.credit()
            return False
        self.write(self.regions.addr(r), payload)
        wr = next(self._ids)
        self._out[wr] = Outstanding(r, remote, len(payload), done)
        if self.qp.post(wr, self.regions.addr(r), len(payload), remote) != 0:
            self._retire(wr)
            return False
        return True

    def send_inline(self, payload: bytes, remote: int) -> bool:
        """Small messages go with the work request and use no region."""
        if not self.credits.debit(timeout=0.1):  # leak: a failed post has no completion and does not credit
            return False
        wr = next(self._ids)
        rc = self.qp.post(wr, 0, len(payload), remote)
        if rc != 0:
            log.warning("inline post failed: %d", rc)
            return False
        self._out[wr] = Outstanding(RegionTable.NIL, remote, len(payload))
        return True

    def send_with_retry(self, payload: bytes, remote: int, tries: int = 5) -> bool:
        for n in range(tries):
            r = self.regions.reserve()  # leak: without a credit the loop tries again with another region
            if r == RegionTable.NIL:
                time.sleep(0.001 << n)
                continue
            if not self.credits.debit(timeout=0.01):  # clean: credited by _retire() or on_completion()
                time.sleep(0.001 << n)
                continue
            self.write(self.regions.addr(r), payload)
            wr = next(self._ids)
            self._out[wr] = Outstanding(r, remote, len(payload))
            if self.qp.post(wr, self.regions.addr(r), len(payload), remote) == 0:
                return True
            self._retire(wr)
        return False

    def _retire(self, wr: int) -> Optional[Outstanding]:
        o = self._out.pop(wr, None)
        if o is None:
            return None
        if o.region != RegionTable.NIL:
            self.regions.unreserve(o.region)
        self.credits.credit()
        return o

    def on_completion(self, wr: int, status: int) -> None:
        o = self._retire(wr)
        if o is not None and o.done is not None:
            o.done(status)

    def reset(self) -> None:
        for wr in list(self._out):
            self._retire(wr)

    # -- set up -----------------------------------------------------------

    def reconnect(self, make: Callable[[], QueuePair]) -> bool:
        if not self._setup.acquire(blocking=False):  # leak: the lock is kept when the pair is still alive
            return False
        if self.qp.alive():
            return True
        try:
            self.reset()
            self.qp = make()
            return self.qp.alive()
        finally:
            self._setup.release()

    def quiesce(self, deadline: float) -> bool:
        self._setup.acquire()  # clean: near miss, each of the two exits releases it
        while self._out:
            if time.monotonic() > deadline:
                self._setup.release()
                return False
            time.sleep(0.001)
        self._setup.release()
        return True


class Batcher:
    """Packs small payloads of one peer in one region."""

    def __init__(self, sender: Sender, remote: int) -> None:
        self.sender = sender
        self.remote = remote
        self._region: Optional[int] = None
        self._fill = 0
        self.flushes = 0

    def add(self, payload: bytes) -> bool:
        cap = self.sender.regions.region_bytes
        if len(payload) > cap:
            raise ValueError(f"{len(payload)} > {cap}")
        if self._region is None:
            r = self.sender.regions.reserve()  # clean: near miss, the batcher's region, moved to _out by flush() or freed by abort()
            if r == RegionTable.NIL:
                return False
            self._region, self._fill = r, 0
        if self._fill + len(payload) > cap:
            if not self.flush():
                return False
            return self.add(payload)
        self.sender.write(self.sender.regions.addr(self._region) + self._fill, payload)
        self._fill += len(payload)
        return True

    def flush(self) -> bool:
        if self._region is None:
            return True
        if not self.sender.credits.debit():  # clean: near miss, credited by _retire() whether or not the post worked
            return False
        wr = next(self.sender._ids)
        r, self._region = self._region, None
        self.sender._out[wr] = Outstanding(r, self.remote, self._fill)
        self.flushes += 1
        if self.sender.qp.post(wr, self.sender.regions.addr(r), self._fill, self.remote) != 0:
            self.sender._retire(wr)
            return False
        return True

    def abort(self) -> None:
        if self._region is not None:
            self.sender.regions.unreserve(self._region)
            self._region = None


def scatter(sender: Sender, payloads: Sequence[bytes], remote: int) -> List[int]:
    """Writes all payloads before the first post; returns the regions still to be posted."""
    held: List[int] = []
    for p in payloads:
        r = sender.regions.reserve()  # leak: an oversized payload returns an empty list and forgets this one and those held
        if r == RegionTable.NIL:
            break
        if len(p) > sender.regions.region_bytes:
            log.error("payload of %d bytes", len(p))
            return []
        sender.write(sender.regions.addr(r), p)
        held.append(r)
    return held
