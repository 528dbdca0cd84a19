"""Raw device heap and the pools that cache its blocks."""
from __future__ import annotations

import bisect
import threading
from collections import defaultdict
from typing import Optional


class DeviceHeap:
    """Address-level allocator; ``malloc`` and ``dealloc`` cost a driver call each."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._next = 0
        self._sizes: dict[int, int] = {}
        self._recycled: dict[int, list[int]] = defaultdict(list)

    def malloc(self, nbytes: int) -> Optional[int]:
        if self._recycled[nbytes]:
            addr = self._recycled[nbytes].pop()
        elif self._next + nbytes <= self._capacity:
            addr = self._next
            self._next += nbytes
        else:
            return None
        self._sizes[addr] = nbytes
        return addr

    def dealloc(self, addr: int) -> None:
        self._recycled[self._sizes.pop(addr)].append(addr)

    def size(self, addr: int) -> int:
        return self._sizes[addr]


class SizeClassPool:
    """Keeps freed blocks by size; trimming lowers the number kept."""

    def __init__(self, heap: DeviceHeap) -> None:
        self._heap = heap
        self._kept: dict[int, list[int]] = defaultdict(list)
        self._lock = threading.Lock()

    def get(self, nbytes: int) -> Optional[int]:
        with self._lock:
            if self._kept[nbytes]:
                return self._kept[nbytes].pop()
            return self._heap.malloc(nbytes)  # leak: trim and close forget kept blocks, none reaches dealloc

    def put(self, addr: int) -> None:
        with self._lock:
            self._kept[self._heap.size(addr)].append(addr)

    def trim(self, per_class: int) -> int:
        dropped = 0
        with self._lock:
            for blocks in self._kept.values():
                while len(blocks) > per_class:
                    blocks.pop()
                    dropped += 1
        return dropped

    def close(self) -> None:
        with self._lock:
            self._kept.clear()


class BestFitPool:
    """Sorted list of kept blocks; the smallest that is large enough is used."""

    def __init__(self, heap: DeviceHeap) -> None:
        self._heap = heap
        self._kept: list[tuple[int, int]] = []

    def get(self, nbytes: int) -> Optional[int]:
        i = bisect.bisect_left(self._kept, (nbytes, 0))
        if i < len(self._kept):
            return self._kept.pop(i)[1]
        addr = self._heap.malloc(nbytes)  # clean: near miss, put keeps it, trim and close dealloc
        if addr is None:
            self.trim(0)
            addr = self._heap.malloc(nbytes)  # clean: near miss, put keeps it, trim and close dealloc
        return addr

    def put(self, addr: int) -> None:
        bisect.insort(self._kept, (self._heap.size(addr), addr))

    def trim(self, keep: int) -> None:
        while len(self._kept) > keep:
            _, addr = self._kept.pop()
            self._heap.dealloc(addr)

    def close(self) -> None:
        self.trim(0)
