"""Host swap space and device pages: moves in both directions."""
from __future__ import annotations

import heapq
from typing import Dict, List, NamedTuple, Optional, Tuple


class Extent(NamedTuple):
    start: int
    length: int


class ExtentPool:
    """First-fit allocator over extents."""

    def __init__(self, size: int):
        self._holes: List[Tuple[int, int]] = [(0, size)]

    def alloc(self, length: int) -> Optional[Extent]:
        for i, (start, size) in enumerate(self._holes):
            if size < length:
                continue
            del self._holes[i]  # clean: near miss, the rest of the hole goes back and the front to the caller
            if size > length:
                heapq.heappush(self._holes, (start + length, size - length))
            return Extent(start, length)
        return None

    def alloc_exact(self, length: int) -> Optional[Extent]:
        """A hole that fits exactly."""
        skipped: List[Tuple[int, int]] = []
        found: Optional[Extent] = None
        while self._holes:
            start, size = heapq.heappop(self._holes)  # clean: near miss, holes that do not fit are put aside and pushed again
            if size == length:
                found = Extent(start, length)
                break
            skipped.append((start, size))
        for hole in skipped:
            heapq.heappush(self._holes, hole)
        return found

    def dealloc(self, ext: Extent) -> None:
        heapq.heappush(self._holes, (ext.start, ext.length))


class Move(NamedTuple):
    rid: str
    src: Extent
    dst: Extent


class Swapper:
    def __init__(self, device: ExtentPool, host: ExtentPool):
        self.device = device
        self.host = host
        self.on_device: Dict[str, Extent] = {}
        self.on_host: Dict[str, Extent] = {}
        self.queue: List[Move] = []

    def place(self, rid: str, length: int) -> bool:
        if rid in self.on_device or rid in self.on_host:
            return False
        ext = self.device.alloc(length)  # clean: on_device keeps it, forget deallocates it
        if ext is None:
            return False
        self.on_device[rid] = ext
        return True

    def place_mirrored(self, rid: str, length: int) -> bool:
        """A device extent with a host mirror."""
        if rid in self.on_device or rid in self.on_host:
            return False
        ext = self.device.alloc(length)  # leak: if the host is full the device extent is not rolled back
        if ext is None:
            return False
        mirror = self.host.alloc(length)  # clean: kept in on_host, forget deallocates it
        if mirror is None:
            return False
        self.on_device[rid] = ext
        self.on_host[rid] = mirror
        return True

    def place_double(self, rid: str, length: int) -> bool:
        """Device extent plus a mirror of exact size; the scratch is for the copy only."""
        if rid in self.on_device or rid in self.on_host:
            return False
        ext = self.device.alloc(length)  # clean: near miss, rolled back by both later failures
        if ext is None:
            return False
        mirror = self.host.alloc_exact(length)  # leak: when no scratch is free only ext is rolled back
        if mirror is None:
            self.device.dealloc(ext)
            return False
        scratch = self.host.alloc(1)  # clean: deallocated right after the None check
        if scratch is None:
            self.device.dealloc(ext)
            return False
        self.host.dealloc(scratch)
        self.on_device[rid] = ext
        self.on_host[rid] = mirror
        return True

    def plan_out(self, rid: str) -> bool:
        src = self.on_device.get(rid)
        if src is None or rid in self.on_host:
            return False
        dst = self.host.alloc(src.length)  # leak: waits in the queue, which abort clears without deallocating the targets
        if dst is None:
            return False
        self.queue.append(Move(rid, src, dst))
        return True

    def commit(self) -> int:
        n = 0
        while self.queue:
            mv = self.queue.pop()
            if self.on_device.get(mv.rid) is not mv.src or mv.rid in self.on_host:
                self.host.dealloc(mv.dst)
                continue
            self.on_host[mv.rid] = mv.dst
            del self.on_device[mv.rid]
            self.device.dealloc(mv.src)
            n += 1
        return n

    def abort(self) -> None:
        self.queue.clear()

    def bring_back(self, rid: str) -> bool:
        src = self.on_host.get(rid)
        if src is None or rid in self.on_device:
            return False
        dst = self.device.alloc(src.length)  # clean: near miss, nothing is held on the way to the second try
        if dst is None:
            self.abort()
            dst = self.device.alloc(src.length)  # clean: near miss, replaces None and ends in on_device
        if dst is None:
            return False
        self.on_device[rid] = dst
        del self.on_host[rid]
        self.host.dealloc(src)
        return True

    def resize(self, rid: str, length: int) -> bool:
        if rid not in self.on_device:
            return False
        ext = self.device.alloc(length)  # leak: overwrites the entry in on_device, the former extent is not deallocated
        if ext is None:
            return False
        self.on_device[rid] = ext
        return True

    def largest_fit(self, lengths: List[int]) -> int:
        best = 0
        for length in sorted(lengths):
            ext = self.device.alloc(length)  # leak: each trial that succeeds is kept, nothing deallocates it
            if ext is None:
                break
            best = length
        return best

    def forget(self, rid: str) -> None:
        ext = self.on_device.pop(rid, None)
        if ext is not None:
            self.device.dealloc(ext)
        ext = self.on_host.pop(rid, None)
        if ext is not None:
            self.host.dealloc(ext)
