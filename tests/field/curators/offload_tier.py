"""Two-tier KV offload: host arena extents in front of numbered disk pages."""
from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Set, Tuple


class Arena:
    """First-fit extents out of one host allocation."""

    def __init__(self, size: int) -> None:
        self._holes: List[Tuple[int, int]] = [(0, size)]

    def carve(self, size: int) -> Optional["Extent"]:
        for i, (start, length) in enumerate(self._holes):
            if length < size:
                continue
            if length == size:
                del self._holes[i]
            else:
                self._holes[i] = (start + size, length - size)
            return Extent(start, size)
        return None

    def restore(self, extent: "Extent") -> None:
        merged: List[Tuple[int, int]] = []
        for start, length in sorted([*self._holes, (extent.start, extent.size)]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._holes = merged


@dataclass(frozen=True)
class Extent:
    start: int
    size: int


class DiskPages:
    def __init__(self, pages: int) -> None:
        self._free: Set[int] = set(range(pages))

    def reserve(self, n: int) -> Optional[List[int]]:
        if len(self._free) < n:
            return None
        return [self._free.pop() for _ in range(n)]

    def unreserve(self, pages: List[int]) -> None:
        self._free.update(pages)


@dataclass
class Entry:
    key: str
    nbytes: int
    extent: Optional[Extent] = None
    pages: Optional[List[int]] = None
    readers: int = 0


class TieredStore:
    def __init__(self, arena: Arena, disk: DiskPages, page_bytes: int, write: Callable[[List[int], Extent], bool]) -> None:
        self.arena = arena
        self.disk = disk
        self.page_bytes = page_bytes
        self.write = write
        self.entries: "OrderedDict[str, Entry]" = OrderedDict()
        self.lock = threading.RLock()
        self.bounce: Optional[Extent] = arena.carve(page_bytes)  # clean: near miss, one bounce extent, restored in close

    def _pages(self, nbytes: int) -> int:
        return -(-nbytes // self.page_bytes)

    def _carve_or_spill(self, nbytes: int) -> Optional[Extent]:
        extent = self.arena.carve(nbytes)  # clean: handed on to the caller
        while extent is None and self._spill_oldest():
            extent = self.arena.carve(nbytes)  # clean: near miss, loops on None only and hands the extent on
        return extent

    def _spill_oldest(self) -> bool:
        for entry in self.entries.values():
            if entry.extent is not None and entry.readers == 0:
                return self.spill(entry)
        return False

    def spill(self, entry: Entry) -> bool:
        assert entry.extent is not None
        if entry.pages is not None:
            self.arena.restore(entry.extent)
            entry.extent = None
            return True
        pages = self.disk.reserve(self._pages(entry.nbytes))  # leak: the failed write returns False without unreserve
        if pages is None:
            return False
        if not self.write(pages, entry.extent):
            return False
        self.arena.restore(entry.extent)
        entry.extent, entry.pages = None, pages
        return True

    def put(self, key: str, nbytes: int) -> Optional[Entry]:
        with self.lock:
            extent = self._carve_or_spill(nbytes)  # leak: a key stored before is overwritten with its own extent
            if extent is None:
                return None
            entry = Entry(key, nbytes, extent)
            self.entries[key] = entry
            return entry

    def put_if_absent(self, key: str, nbytes: int) -> Entry | None:
        with self.lock:
            extent = self._carve_or_spill(nbytes)  # clean: near miss, restored when the key is there already
            if extent is None:
                return self.entries.get(key)
            known = self.entries.get(key)
            if known is not None:
                self.arena.restore(extent)
                return known
            entry = self.entries[key] = Entry(key, nbytes, extent)
            return entry

    def acquire(self, key: str) -> Optional[Entry]:
        with self.lock:
            entry = self.entries.get(key)
            if entry is None:
                return None
            entry.readers += 1
            self.entries.move_to_end(key)
            return entry

    def done(self, entry: Entry) -> None:
        with self.lock:
            entry.readers -= 1

    def fetch(self, key: str) -> Optional[Extent]:
        entry = self.acquire(key)  # leak: no host room returns None with the reader still counted
        if entry is None:
            return None
        if entry.extent is None:
            extent = self._carve_or_spill(entry.nbytes)  # clean: near miss, becomes the extent of the entry, which remove restores
            if extent is None:
                return None
            entry.extent = extent
        result = entry.extent
        self.done(entry)
        return result

    def longest_prefix(self, keys: List[str]) -> List[Entry]:
        held: List[Entry] = []
        for key in keys:
            entry = self.acquire(key)  # clean: handed on in the list, the caller is done with each
            if entry is None:
                break
            held.append(entry)
        return held

    def prefix_bytes(self, keys: List[str]) -> int:
        held = self.longest_prefix(keys)  # leak: the readers of the held entries are never done
        return sum(entry.nbytes for entry in held)

    def export(self, keys: List[str], sink: Callable[[Entry], None]) -> int:
        held = self.longest_prefix(keys)  # clean: near miss, popped and done one by one until the list is empty
        count = len(held)
        while held:
            entry = held.pop()
            if entry.extent is not None:
                sink(entry)
            self.done(entry)
        return count

    def remove(self, key: str) -> bool:
        with self.lock:
            entry = self.entries.get(key)
            if entry is None or entry.readers:
                return False
            del self.entries[key]
            if entry.extent is not None:
                self.arena.restore(entry.extent)
            if entry.pages is not None:
                self.disk.unreserve(entry.pages)
            return True

    def defrag_probe(self, sizes: List[int]) -> Dict[int, bool]:
        fits: Dict[int, bool] = {}
        for size in sizes:
            extent = self.arena.carve(size)  # leak: carved only to see if it fits and never restored
            fits[size] = extent is not None
        return fits

    def close(self) -> None:
        for entry in self.entries.values():
            if entry.extent is not None:
                self.arena.restore(entry.extent)
            if entry.pages is not None:
                self.disk.unreserve(entry.pages)
        self.entries.clear()
        if self.bounce is not None:
            self.arena.restore(self.bounce)
            self.bounce = None
