"""Swapping of tensors to NVMe: aligned regions, swap files and pinned pages."""
from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

log = logging.getLogger("swap")

PAGE = 4096


@dataclass(frozen=True)
class Region:
    start: int
    pages: int


class SwapFull(Exception):
    pass


class PageTable:
    """Pages of host memory; pinned pages may not be reclaimed."""

    def __init__(self, pages: int) -> None:
        self._pins = [0] * pages
        self._data: List[bytes] = [b""] * pages

    def pin(self, page: int) -> memoryview:
        self._pins[page] += 1
        return memoryview(self._data[page])

    def unpin(self, page: int) -> None:
        if self._pins[page] <= 0:
            raise ValueError(page)
        self._pins[page] -= 1

    def fill(self, page: int, data: bytes) -> None:
        self._data[page] = data

    def reclaimable(self) -> List[int]:
        return [i for i, p in enumerate(self._pins) if p == 0]


class SwapSpace:
    def __init__(self, path: str, pages: int) -> None:
        self.path = path
        self._bitmap = bytearray(pages)
        self._lock = threading.Lock()

    def claim(self, pages: int) -> Region:
        with self._lock:
            run = 0
            for i, used in enumerate(self._bitmap):
                run = 0 if used else run + 1
                if run == pages:
                    start = i - pages + 1
                    self._bitmap[start:i + 1] = b"\1" * pages
                    return Region(start, pages)
        raise SwapFull(pages)

    def unclaim(self, region: Region) -> None:
        with self._lock:
            self._bitmap[region.start:region.start + region.pages] = bytes(region.pages)

    def used(self) -> int:
        return sum(self._bitmap)


class Swapper:
    def __init__(self, space: SwapSpace, table: PageTable) -> None:
        self.space = space
        self.table = table
        self._where: Dict[str, Region] = {}
        self.errors = 0

    def _write(self, region: Region, data: bytes) -> None:
        fd = os.open(self.space.path, os.O_RDWR | os.O_CREAT)  # clean: closed in finally
        try:
            os.pwrite(fd, data, region.start * PAGE)
        finally:
            os.close(fd)

    def _read(self, region: Region, nbytes: int) -> bytes:
        fd = os.open(self.space.path, os.O_RDONLY)  # leak: a short read returns before the close
        data = os.pread(fd, nbytes, region.start * PAGE)
        if len(data) < nbytes:
            self.errors += 1
            return b""
        os.close(fd)
        return data

    def swap_out(self, name: str, data: bytes) -> bool:
        if name in self._where:
            self.space.unclaim(self._where.pop(name))
        pages = -(-len(data) // PAGE)
        try:
            region = self.space.claim(pages)  # clean: near miss, the handler is for the failed claim, else kept in the table
        except SwapFull:
            log.warning("no swap for %s", name)
            return False
        self._write(region, data)
        self._where[name] = region
        return True

    def swap_out_checked(self, name: str, data: bytes) -> bool:
        region = self.space.claim(-(-len(data) // PAGE))  # leak: a write error is survived with the region claimed
        try:
            self._write(region, data)
        except OSError as exc:
            self.errors += 1
            log.error("write of %s failed: %s", name, exc)
            return False
        previous = self._where.get(name)
        self._where[name] = region
        if previous is not None:
            self.space.unclaim(previous)
        return True

    def swap_in(self, name: str, nbytes: int) -> Optional[bytes]:
        region = self._where.pop(name, None)
        if region is None:
            return None
        data = self._read(region, nbytes)
        self.space.unclaim(region)
        return data

    def relocate(self, name: str, nbytes: int) -> None:
        """Moves an entry towards the start of the file."""
        old = self._where[name]
        new = self.space.claim(old.pages)  # clean: near miss, whichever region loses is unclaimed
        if new.start > old.start:
            self.space.unclaim(new)
            return
        self._write(new, self._read(old, nbytes))
        self._where[name] = new
        self.space.unclaim(old)

    def swap_group(self, items: List[Tuple[str, bytes]]) -> bool:
        """All or nothing."""
        done: List[Tuple[str, Region]] = []
        for name, data in items:
            try:
                region = self.space.claim(-(-len(data) // PAGE))  # clean: near miss, the handler unclaims all earlier ones
            except SwapFull:
                for _, r in done:
                    self.space.unclaim(r)
                return False
            done.append((name, region))
        for (name, data), (_, region) in zip(items, done):
            self._write(region, data)
            old = self._where.pop(name, None)
            if old is not None:
                self.space.unclaim(old)
            self._where[name] = region
        return True

    def swap_group_pairs(self, a: bytes, b: bytes) -> Optional[Tuple[Region, Region]]:
        first = self.space.claim(-(-len(a) // PAGE))  # leak: not unclaimed when the second is refused
        try:
            second = self.space.claim(-(-len(b) // PAGE))  # clean: near miss, refused or returned
        except SwapFull:
            return None
        self._write(first, a)
        self._write(second, b)
        return first, second

    def evict_page(self, page: int, name: str) -> bool:
        view = self.table.pin(page)  # leak: stays pinned when swap has no room
        if not self.swap_out(name, bytes(view)):
            return False
        self.table.unpin(page)
        self.table.fill(page, b"")
        return True

    def evict_pages(self, pages: List[int]) -> int:
        done = 0
        for page in pages:
            view = self.table.pin(page)  # clean: near miss, unpinned before either continue
            data = bytes(view)
            self.table.unpin(page)
            if not data:
                continue
            if not self.swap_out(f"page{page}", data):
                continue
            self.table.fill(page, b"")
            done += 1
        return done

    def longest(self, pages: List[int]) -> int:
        best, best_len = -1, -1
        for page in pages:
            view = self.table.pin(page)  # leak: unpinned only when it is not the longest so far
            if len(view) <= best_len:
                self.table.unpin(page)
                continue
            best, best_len = page, len(view)
        return best
