"""Moves KV pages between a prefill host and decode hosts.

A transfer needs a registered staging region, a send credit of the peer and a
completion ticket.  Completions are polled by one thread per NIC.
"""
from __future__ import annotations

import ctypes
import itertools
import logging
import queue
import struct
import threading
import time
from typing import Callable, NamedTuple

log = logging.getLogger(__name__)

HEADER = struct.Struct("<IIQ")


class Region(NamedTuple):
    addr: int
    length: int
    rkey: int


class RegionRing:
    """Registered bounce regions in a blocking queue."""

    def __init__(self, nic, count: int, length: int):
        self._q: queue.Queue[Region] = queue.Queue()
        self.length = length
        for _ in range(count):
            self._q.put(nic.register(length))  # clean: near miss, registered region enters the ring for good

    def next_region(self, timeout: float = 1.0) -> Region | None:
        try:
            return self._q.get(timeout=timeout)  # clean: returned to the caller
        except queue.Empty:
            return None

    def recycle(self, region: Region) -> None:
        self._q.put(region)

    def largest(self, want: int) -> Region | None:
        """First region that holds `want` bytes."""
        for _ in range(self._q.qsize()):
            region = self._q.get_nowait()  # clean: near miss, small ones go back before the next get
            if region.length >= want:
                return region
            self._q.put(region)
        return None


class PeerCredits:
    """Outstanding sends per peer."""

    def __init__(self, limit: int):
        self.limit = limit
        self._used: dict[str, int] = {}
        self._cv = threading.Condition()

    def draw(self, peer: str, timeout: float | None = None) -> bool:
        with self._cv:
            ok = self._cv.wait_for(lambda: self._used.get(peer, 0) < self.limit, timeout)
            if ok:
                self._used[peer] = self._used.get(peer, 0) + 1
            return ok

    def refund(self, peer: str) -> None:
        with self._cv:
            self._used[peer] -= 1
            self._cv.notify()


class Tickets:
    """Completion ids of a 16 bit immediate field."""

    def __init__(self, n: int = 1 << 12):
        self._ids = list(range(n))
        self.callbacks: dict[int, Callable[[int], None]] = {}

    def draw(self, cb: Callable[[int], None]) -> int:
        tid = self._ids.pop()  # clean: returned, callbacks remembers it until punch
        self.callbacks[tid] = cb
        return tid

    def punch(self, tid: int, status: int) -> None:
        cb = self.callbacks.pop(tid)
        self._ids.append(tid)
        cb(status)

    def void(self, tid: int) -> None:
        del self.callbacks[tid]
        self._ids.append(tid)


class PageMover:
    def __init__(self, nic, ring: RegionRing, credits: PeerCredits, tickets: Tickets):
        self.nic = nic
        self.ring = ring
        self.credits = credits
        self.tickets = tickets
        self.posted: dict[int, tuple[str, Region]] = {}
        self._seq = itertools.count()

    # -- one page, asynchronous ------------------------------------------------

    def post_page(self, peer: str, page: memoryview, done: Callable[[int], None]) -> bool:
        if not self.credits.draw(peer, timeout=0.5):  # clean: refunded on failure or in _complete
            return False
        region = self.ring.next_region()  # clean: near miss, posted holds it and _complete recycles it
        if region is None:
            self.credits.refund(peer)
            return False
        tid = self.tickets.draw(lambda st: self._complete(tid, st, done))  # clean: punched by the poller, voided on failure
        ctypes.memmove(region.addr, (ctypes.c_char * len(page)).from_buffer(page), len(page))
        self.posted[tid] = (peer, region)
        if not self.nic.post_write(peer, region, tid):
            self.tickets.void(tid)
            del self.posted[tid]
            self.ring.recycle(region)
            self.credits.refund(peer)
            return False
        return True

    def _complete(self, tid: int, status: int, done: Callable[[int], None]) -> None:
        peer, region = self.posted.pop(tid)  # clean: region recycled and credit refunded here
        self.ring.recycle(region)
        self.credits.refund(peer)
        done(status)

    # -- one page, synchronous -------------------------------------------------

    def send_page(self, peer: str, page_id: int, payload: bytes) -> bool:
        if not self.credits.draw(peer):  # leak: credit not refunded when no region is free
            return False
        region = self.ring.next_region()  # clean: recycled in finally
        if region is None:
            log.warning("no bounce region for page %d", page_id)
            return False
        try:
            header = HEADER.pack(page_id, len(payload), next(self._seq))
            self.nic.write_local(region, header + payload)
            return self.nic.write_sync(peer, region)
        finally:
            self.ring.recycle(region)
            self.credits.refund(peer)

    def send_with_retry(self, peer: str, payload: bytes, attempts: int = 3) -> bool:
        for i in range(attempts):
            region = self.ring.next_region()  # leak: a transient failure continues to a new region, keeping the old one
            if region is None:
                time.sleep(0.01 * (i + 1))
                continue
            self.nic.write_local(region, payload)
            try:
                self.nic.write_sync(peer, region)
            except ConnectionResetError:
                self.nic.reconnect(peer)
                continue
            self.ring.recycle(region)
            return True
        return False

    # -- batches ---------------------------------------------------------------

    def gather(self, peer: str, pages: list[bytes]) -> list[Region]:
        """Regions filled with pages; the caller recycles them after the flush."""
        out: list[Region] = []
        for page in pages:
            region = self.ring.largest(len(page))  # leak: not added to out when the page fails its checksum
            if region is None:
                break
            if not self.nic.checksum_ok(page):
                log.error("page checksum mismatch towards %s", peer)
                continue
            self.nic.write_local(region, page)
            out.append(region)
        return out

    def flush(self, peer: str, pages: list[bytes]) -> int:
        regions = self.gather(peer, pages)  # clean: every region of the list is recycled in finally
        try:
            return self.nic.write_many(peer, regions)
        finally:
            for region in regions:
                self.ring.recycle(region)

    def probe_peer(self, peer: str, pages: list[bytes]) -> bool:
        regions = self.gather(peer, pages[:2])  # leak: both regions are dropped when only one could be filled
        if len(regions) < 2:
            return False
        ok = self.nic.compare_rtt(peer, *regions)
        for region in regions:
            self.ring.recycle(region)
        return ok


class HandoffSession:
    """One request's pages, moved layer by layer."""

    def __init__(self, mover: PageMover, peer: str, layers: int):
        self.mover = mover
        self.peer = peer
        self.layers = layers
        self.credit = False
        self.region: Region | None = None
        self.failed = False

    def __enter__(self) -> "HandoffSession":
        self.region = self.mover.ring.next_region()  # leak: __exit__ returns before recycling when failed is set
        if self.region is None:
            raise TimeoutError(self.peer)
        return self

    def __exit__(self, et, ev, tb) -> bool:
        if self.credit:
            self.mover.credits.refund(self.peer)
            self.credit = False
        if self.failed:
            self.mover.nic.reconnect(self.peer)
            return False
        if self.region is not None:
            self.mover.ring.recycle(self.region)
            self.region = None
        return False

    def start(self) -> bool:
        self.credit = self.mover.credits.draw(self.peer, timeout=5.0)  # clean: near miss, __exit__ refunds it under the same flag
        return self.credit

    def move_layer(self, layer: int, page: bytes) -> None:
        self.mover.nic.write_local(self.region, page)
        if not self.mover.nic.write_sync(self.peer, self.region):
            self.failed = True


def hand_off(mover: PageMover, peer: str, pages: list[bytes]) -> bool:
    with HandoffSession(mover, peer, len(pages)) as session:
        if not session.start():  # clean: refunded by __exit__
            return False
        for layer, page in enumerate(pages):
            session.move_layer(layer, page)
            if session.failed:
                return False
    return True
