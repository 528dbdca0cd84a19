"""KV offload over three tiers: device pages, host slots (bitmap), disk extents (module level).

The disk tier is process wide, so it lives in the module: `disk_claim` and `disk_free`.
"""
from __future__ import annotations

import heapq
import os
import threading
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Dict, List, Optional, Tuple

_DISK_EXTENT = 4 << 20
_disk_free: List[int] = list(range(1024))
_disk_lock = threading.Lock()


def disk_claim() -> Optional[int]:
    with _disk_lock:
        return heapq.heappop(_disk_free) if _disk_free else None


def disk_free(extent: int) -> None:
    with _disk_lock:
        heapq.heappush(_disk_free, extent)


class Tier(IntEnum):
    DEVICE = 0
    HOST = 1
    DISK = 2


class HostBitmap:
    def __init__(self, nbits: int) -> None:
        self._bits = bytearray(nbits)
        self._next = 0

    def set_one(self) -> int:
        n = len(self._bits)
        for k in range(n):
            i = (self._next + k) % n
            if not self._bits[i]:
                self._bits[i] = 1
                self._next = i + 1
                return i
        return -1

    def clear_one(self, i: int) -> None:
        self._bits[i] = 0

    def set_many(self, n: int) -> Optional[List[int]]:
        got = [self.set_one() for _ in range(n)]  # leak: the slots beside a -1 stay set on the None return
        if -1 in got:
            return None
        return got


class TieredSlots:
    """Host slots with a reserve taken from the bitmap up front, so that eviction never blocks."""

    def __init__(self, bits: HostBitmap, reserve: int) -> None:
        self.bits = bits
        self._cushion: List[int] = []
        for _ in range(reserve):
            i = self.bits.set_one()  # clean: near miss, in the cushion, which dissolve() clears
            if i >= 0:
                self._cushion.append(i)

    def obtain(self, urgent: bool = False) -> int:
        i = self.bits.set_one()  # clean: returned
        if i < 0 and urgent and self._cushion:
            return self._cushion.pop()
        return i

    def obtain_even(self) -> int:
        i = self.bits.set_one()  # leak: an odd slot is neither kept nor cleared
        if i >= 0 and i % 2:
            return -1
        return i

    def yield_back(self, i: int) -> None:
        self.bits.clear_one(i)

    def dissolve(self) -> None:
        while self._cushion:
            self.bits.clear_one(self._cushion.pop())


@dataclass
class Parcel:
    key: int
    tier: Tier = Tier.DEVICE
    host: int = -1
    disk: Optional[int] = None
    pins: int = 0


class Offloader:
    def __init__(self, slots: TieredSlots, mover: Any, use_disk: bool, fd: int = -1) -> None:
        self.slots = slots
        self.mover = mover
        self.use_disk = use_disk
        self.fd = fd
        self.parcels: Dict[int, Parcel] = {}
        self.queue: List[Tuple[int, int, int]] = []

    def demote(self, p: Parcel) -> bool:
        if p.tier != Tier.DEVICE:
            return True
        slot = self.slots.obtain()  # leak: not yielded back when the parcel is pinned
        if slot < 0:
            return False
        if p.pins:
            return False
        self.mover.d2h(p.key, slot)
        p.host = slot
        p.tier = Tier.HOST
        return True

    def demote_many(self, ps: List[Parcel]) -> int:
        n = 0
        for p in ps:
            if p.pins or p.tier != Tier.DEVICE:
                continue
            slot = self.slots.obtain(urgent=True)  # clean: near miss, the filter stands before it, parcel holds it
            if slot < 0:
                break
            self.mover.d2h(p.key, slot)
            p.host, p.tier = slot, Tier.HOST
            n += 1
        return n

    def sink(self, p: Parcel) -> bool:
        """Host to disk."""
        if p.tier != Tier.HOST or p.disk is not None:
            return False
        ext = disk_claim()  # leak: a short write returns without freeing the extent
        if ext is None:
            return False
        n = os.pwrite(self.fd, self.mover.host_view(p.host), ext * _DISK_EXTENT)
        if n < self.mover.nbytes:
            return False
        self.slots.yield_back(p.host)
        p.host = -1
        p.disk, p.tier = ext, Tier.DISK
        return True

    def raise_up(self, p: Parcel) -> bool:
        """Disk to host. The slot and the extent change hands."""
        if p.tier != Tier.DISK or p.disk is None:
            return False
        slot = self.slots.obtain()  # clean: yielded back on a short read, else the parcel's
        if slot < 0:
            return False
        data = os.pread(self.fd, self.mover.nbytes, p.disk * _DISK_EXTENT)
        if len(data) < self.mover.nbytes:
            self.slots.yield_back(slot)
            return False
        self.mover.host_view(slot)[:] = data
        disk_free(p.disk)
        p.disk = None
        p.host, p.tier = slot, Tier.HOST
        return True

    def promote(self, p: Parcel) -> None:
        if p.tier == Tier.HOST:
            self.mover.h2d(p.host, p.key)
            self.slots.yield_back(p.host)
            p.host = -1
            p.tier = Tier.DEVICE

    def mirror(self, p: Parcel) -> Optional[int]:
        """Keep a copy on disk of a parcel that stays on the host."""
        ext = disk_claim() if self.use_disk else None  # clean: near miss, freed or kept by the parcel under use_disk
        if self.use_disk and ext is not None:
            n = os.pwrite(self.fd, self.mover.host_view(p.host), ext * _DISK_EXTENT)
            if n < self.mover.nbytes or p.disk is not None:
                disk_free(ext)
                return None
            p.disk = ext
        return ext

    def probe_disk(self) -> float:
        ext = disk_claim()  # clean: freed in finally
        if ext is None:
            return 0.0
        try:
            return float(os.pwrite(self.fd, b"\0" * 4096, ext * _DISK_EXTENT))
        finally:
            disk_free(ext)

    def enqueue_demote(self, p: Parcel, prio: int) -> bool:
        slot = self.slots.obtain()  # leak: drain() pops the slot of a parcel that is gone and forgets it
        if slot < 0:
            return False
        heapq.heappush(self.queue, (prio, p.key, slot))
        return True

    def drain(self) -> None:
        while self.queue:
            _, key, slot = heapq.heappop(self.queue)
            p = self.parcels.get(key)
            if p is None:
                continue
            if p.tier != Tier.DEVICE:
                self.slots.yield_back(slot)
                continue
            self.mover.d2h(key, slot)
            p.host, p.tier = slot, Tier.HOST

    def forget(self, key: int) -> None:
        p = self.parcels.pop(key, None)
        if p is None:
            return
        if p.host >= 0:
            self.slots.yield_back(p.host)
        if p.disk is not None:
            disk_free(p.disk)

    def scratch_copy(self, src: int) -> bytes:
        slot = self.slots.obtain(urgent=True)  # clean: yielded back before the return
        if slot < 0:
            raise MemoryError("host tier")
        self.mover.h2h(src, slot)
        data = bytes(self.mover.host_view(slot))
        self.slots.yield_back(slot)
        return data
