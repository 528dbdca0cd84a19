"""RDMA memory regions: a registration cache with pin counts, and the verbs that use it."""
from __future__ import annotations

import dataclasses
import threading
from typing import Iterable

PAGE = 4096


class RegError(RuntimeError):
    pass


@dataclasses.dataclass
class Region:
    base: int
    length: int
    lkey: int
    rkey: int
    pins: int = 0
    doomed: bool = False

    def covers(self, addr: int, length: int) -> bool:
        return self.base <= addr and addr + length <= self.base + self.length


@dataclasses.dataclass
class WorkRequest:
    wr_id: int
    region: Region
    addr: int
    length: int
    opcode: str = "WRITE"


class RegionCache:
    """pin() hands a region out with its count raised; unpin() lowers it. Zero-count regions may be evicted."""

    def __init__(self, nic, limit: int) -> None:
        self.nic = nic
        self.limit = limit
        self._regions: list[Region] = []
        self._lock = threading.RLock()

    def pin(self, addr: int, length: int) -> Region | None:
        with self._lock:
            for region in self._regions:
                if region.covers(addr, length) and not region.doomed:
                    region.pins += 1
                    return region
            if len(self._regions) >= self.limit and not self._evict():
                return None
            lkey, rkey = self.nic.register(addr, length)  # clean: kept in _regions, deregistered on eviction
            region = Region(addr, length, lkey, rkey, pins=1)
            self._regions.append(region)
            return region

    def unpin(self, region: Region) -> None:
        with self._lock:
            region.pins -= 1
            if region.pins == 0 and region.doomed:
                self.nic.deregister(region.lkey)
                self._regions.remove(region)

    def _evict(self) -> bool:
        for region in self._regions:
            if region.pins == 0:
                self.nic.deregister(region.lkey)
                self._regions.remove(region)
                return True
        return False

    def pin_aligned(self, addr: int, length: int) -> Region | None:
        start = addr & ~(PAGE - 1)
        end = (addr + length + PAGE - 1) & ~(PAGE - 1)
        return self.pin(start, end - start)  # clean: returned to the caller

    def pin_checked(self, addr: int, length: int, want_rkey: int) -> Region | None:
        region = self.pin_aligned(addr, length)  # leak: returns None with the count raised on a key mismatch
        if region is None:
            return None
        if region.rkey != want_rkey:
            return None
        return region


class PinSet:
    """Regions of one scatter-gather list."""

    def __init__(self, cache: RegionCache) -> None:
        self.cache = cache
        self.regions: list[Region] = []

    def add(self, addr: int, length: int) -> bool:
        region = self.cache.pin_aligned(addr, length)  # clean: kept in regions, which clear() empties
        if region is None:
            return False
        self.regions.append(region)
        return True

    def clear(self) -> None:
        for region in self.regions:
            self.cache.unpin(region)
        self.regions.clear()


class Engine:
    def __init__(self, cache: RegionCache, qp) -> None:
        self.cache = cache
        self.qp = qp
        self._inflight: dict[int, WorkRequest] = {}
        self._next = 0

    def _id(self) -> int:
        self._next += 1
        return self._next

    def write(self, addr: int, length: int, raddr: int) -> int | None:
        region = self.cache.pin(addr, length)  # clean: carried by the work request until on_completion
        if region is None:
            return None
        wr = WorkRequest(self._id(), region, addr, length)
        if not self.qp.post_write(wr.wr_id, region.lkey, addr, length, raddr):
            self.cache.unpin(region)
            return None
        self._inflight[wr.wr_id] = wr
        return wr.wr_id

    def read(self, addr: int, length: int, raddr: int) -> int | None:
        region = self.cache.pin(addr, length)  # leak: not unpinned when the queue pair refuses the read
        if region is None:
            return None
        wr = WorkRequest(self._id(), region, addr, length, opcode="READ")
        if not self.qp.post_read(wr.wr_id, region.lkey, addr, length, raddr):
            return None
        self._inflight[wr.wr_id] = wr
        return wr.wr_id

    def on_completion(self, wr_id: int, status: int) -> None:
        wr = self._inflight.pop(wr_id, None)
        if wr is None:
            return
        self.cache.unpin(wr.region)
        if status != 0:
            self.qp.mark_error(wr.opcode)

    def flush_error(self) -> int:
        dropped = 0
        while self._inflight:
            _, wr = self._inflight.popitem()
            self.cache.unpin(wr.region)
            dropped += 1
        return dropped

    def copy_local(self, src: int, dst: int, length: int) -> bool:
        s = self.cache.pin(src, length)  # leak: not rolled back when the destination cannot be pinned
        if s is None:
            return False
        d = self.cache.pin(dst, length)  # clean: unpinned after the loopback copy
        if d is None:
            return False
        self.qp.loopback(s.lkey, d.lkey, length)
        self.cache.unpin(d)
        self.cache.unpin(s)
        return True

    def swap_local(self, left: int, right: int, length: int) -> bool:
        a = self.cache.pin(left, length)  # clean: finally unpins whichever was taken
        b = None
        try:
            if a is None:
                return False
            b = self.cache.pin(right, length)  # clean: unpinned in finally
            if b is None:
                return False
            self.qp.swap(a.lkey, b.lkey, length)
            return True
        finally:
            for region in (a, b):
                if region is not None:
                    self.cache.unpin(region)

    def gather(self, segments: Iterable[tuple[int, int]], raddr: int) -> bool:
        pins = PinSet(self.cache)
        for addr, length in segments:
            if not pins.add(addr, length):  # clean: near miss, the set is cleared on failure too
                pins.clear()
                return False
        ok = self.qp.post_sgl([r.lkey for r in pins.regions], raddr)
        pins.clear()
        return ok

    def gather_nowait(self, segments: Iterable[tuple[int, int]], raddr: int) -> bool:
        pins = PinSet(self.cache)
        for addr, length in segments:
            if not pins.add(addr, length):  # leak: regions added before the failing one stay pinned
                return False
        ok = self.qp.post_sgl([r.lkey for r in pins.regions], raddr)
        pins.clear()
        return ok

    def peer_keys(self, spans: list[tuple[int, int]]) -> list[int]:
        keys = []
        for addr, length in spans:
            region = self.cache.pin_aligned(addr, length)  # leak: spans under a page are skipped with the pin held
            if region is None:
                raise RegError("registration limit")
            if region.length <= PAGE:
                continue
            keys.append(region.rkey)
            self.cache.unpin(region)
        return keys
