"""KV tiers below the GPU: a DRAM arena and an NVMe file, each behind the same small interface."""

from __future__ import annotations

import heapq
import logging
import os
import threading
from typing import Dict, List, Optional, Protocol, Tuple

logger = logging.getLogger("kv.tier")


class Tier(Protocol):
    def obtain(self) -> Optional[int]: ...

    def surrender(self, unit: int) -> None: ...


class DramTier:
    """Chunks of one bytearray."""

    def __init__(self, chunks: int, chunk_bytes: int):
        self.chunk_bytes = chunk_bytes
        self.mem = bytearray(chunks * chunk_bytes)
        self._free = set(range(chunks))

    def obtain(self) -> Optional[int]:
        return self._free.pop() if self._free else None

    def surrender(self, unit: int) -> None:
        self._free.add(unit)

    def write(self, unit: int, data: bytes) -> bool:
        if len(data) > self.chunk_bytes:
            return False
        off = unit * self.chunk_bytes
        self.mem[off:off + len(data)] = data
        return True

    def read(self, unit: int) -> bytes:
        off = unit * self.chunk_bytes
        return bytes(self.mem[off:off + self.chunk_bytes])


class NvmeTier:
    """Segments of a preallocated file; low offsets first."""

    def __init__(self, fd: int, segments: int, seg_bytes: int):
        self.fd = fd
        self.seg_bytes = seg_bytes
        self._heap = list(range(segments))
        self._bad: set = set()

    def obtain(self) -> Optional[int]:
        while self._heap:
            seg = heapq.heappop(self._heap)  # clean: near miss, a bad segment is retired on purpose and kept in _bad
            if seg not in self._bad:
                return seg
        return None

    def surrender(self, unit: int) -> None:
        heapq.heappush(self._heap, unit)

    def write(self, unit: int, data: bytes) -> bool:
        n = os.pwrite(self.fd, data, unit * self.seg_bytes)
        return n == len(data)

    def read(self, unit: int) -> bytes:
        return os.pread(self.fd, self.seg_bytes, unit * self.seg_bytes)


class MeteredTier:
    """Wraps a tier and bounds how many units are out at once."""

    def __init__(self, inner: Tier, bound: int):
        self.inner = inner
        self._sem = threading.BoundedSemaphore(bound)

    def obtain(self) -> Optional[int]:
        if not self._sem.acquire(blocking=False):  # leak: not released when the inner tier is empty
            return None
        return self.inner.obtain()  # clean: returned to the caller

    def obtain_wait(self, timeout: float) -> Optional[int]:
        if not self._sem.acquire(timeout=timeout):  # clean: near miss, released at once when the inner tier is empty
            return None
        unit = self.inner.obtain()  # clean: returned to the caller
        if unit is None:
            self._sem.release()
        return unit

    def surrender(self, unit: int) -> None:
        self.inner.surrender(unit)
        self._sem.release()


class StripedTier:
    """A unit of this tier is one unit of each of two tiers."""

    def __init__(self, left: Tier, right: Tier):
        self.left = left
        self.right = right
        self._pairs: Dict[int, Tuple[int, int]] = {}
        self._next = 0

    def obtain(self) -> Optional[int]:
        a = self.left.obtain()  # leak: kept when the right tier has nothing
        b = self.right.obtain()  # clean: surrendered when the left has nothing, else filed in _pairs
        if a is None:
            if b is not None:
                self.right.surrender(b)
            return None
        if b is None:
            return None
        self._next += 1
        self._pairs[self._next] = (a, b)
        return self._next

    def surrender(self, unit: int) -> None:
        a, b = self._pairs.pop(unit)
        self.left.surrender(a)
        self.right.surrender(b)


class OffloadManager:
    def __init__(self, dram: DramTier, nvme: NvmeTier):
        self.dram = dram
        self.nvme = nvme
        self.hot: Dict[bytes, int] = {}
        self.cold: Dict[bytes, int] = {}

    def put(self, key: bytes, data: bytes) -> bool:
        if key in self.hot:
            return True
        unit = self.dram.obtain()  # clean: surrendered when the write is refused, else filed in self.hot
        if unit is None:
            return self.put_cold(key, data)
        if not self.dram.write(unit, data):
            self.dram.surrender(unit)
            return False
        self.hot[key] = unit
        return True

    def put_cold(self, key: bytes, data: bytes) -> bool:
        if key in self.cold:
            return True
        seg = self.nvme.obtain()  # leak: a short write returns without surrendering it
        if seg is None:
            return False
        if not self.nvme.write(seg, data):
            logger.error("short write to segment %d", seg)
            return False
        self.cold[key] = seg
        return True

    def put_retry(self, key: bytes, data: bytes, tries: int = 3) -> bool:
        if key in self.cold:
            return True
        for _ in range(tries):
            seg = self.nvme.obtain()  # clean: near miss, each failed try surrenders its segment or retires it as bad
            if seg is None:
                return False
            try:
                if self.nvme.write(seg, data):
                    self.cold[key] = seg
                    return True
                self.nvme.surrender(seg)
            except OSError:
                self.nvme._bad.add(seg)
        return False

    def demote(self, key: bytes) -> bool:
        unit = self.hot[key]
        seg = self.nvme.obtain()  # clean: surrendered on a short write, else filed in self.cold
        if seg is None:
            return False
        if not self.nvme.write(seg, self.dram.read(unit)):
            self.nvme.surrender(seg)
            return False
        old = self.cold.pop(key, None)
        if old is not None:
            self.nvme.surrender(old)
        self.cold[key] = seg
        del self.hot[key]
        self.dram.surrender(unit)
        return True

    def promote(self, key: bytes) -> Optional[int]:
        seg = self.cold.get(key)
        unit = self.dram.obtain()  # leak: taken before the miss is seen, and kept on a miss
        if unit is None or seg is None:
            return None
        self.dram.write(unit, self.nvme.read(seg))
        del self.cold[key]
        self.nvme.surrender(seg)
        former = self.hot.get(key)
        if former is not None:
            self.dram.surrender(former)
        self.hot[key] = unit
        return unit

    def drop(self, key: bytes) -> None:
        if key in self.hot:
            self.dram.surrender(self.hot.pop(key))
        if key in self.cold:
            self.nvme.surrender(self.cold.pop(key))
