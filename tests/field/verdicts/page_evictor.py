"""Page table with clock eviction. Pools own their bodies; the tests in CI drive them directly."""
from __future__ import annotations

import logging
from collections import deque
from typing import Iterator

import torch

logger = logging.getLogger("evict")


class PageError(Exception):
    pass


class PageHeap:
    def __init__(self, pages: int) -> None:
        self._free: list[int] = list(range(pages))
        self._dirty: set[int] = set()
        self._quarantine: deque[int] = deque()
        self.total = pages

    def alloc_page(self) -> int:
        if not self._free:
            raise PageError("heap empty")
        return self._free.pop()

    def dealloc_page(self, page: int) -> None:
        if page in self._dirty:
            self._quarantine.append(page)
        else:
            self._free.append(page)

    def mark_dirty(self, page: int) -> None:
        self._dirty.add(page)

    def alloc_clean(self) -> int | None:
        while self._free:
            page = self._free.pop()  # clean: near miss, dirty pages are parked in the quarantine which scrub empties
            if page in self._dirty:
                self._quarantine.append(page)
                continue
            return page
        return None

    def alloc_below(self, bound: int) -> int:
        if not self._free:
            raise PageError("heap empty")
        page = self._free.pop()  # leak: the page is lost when it lies over the bound
        if page >= bound:
            raise PageError(f"page {page} over bound {bound}")
        return page

    def alloc_even(self) -> int | None:
        seen: list[int] = []
        found = None
        while self._free and found is None:
            page = self._free.pop()  # clean: near miss, odd pages are put back by extend
            if page % 2:
                seen.append(page)
            else:
                found = page
        self._free.extend(seen)
        return found

    def alloc_run(self, n: int) -> list[int]:
        run = []
        while len(run) < n:
            if not self._free:
                raise PageError(f"{n} pages wanted, {len(run)} found")
            run.append(self._free.pop())  # leak: pages of an incomplete run vanish with the raise
        return run

    def scrub(self) -> int:
        n = 0
        while self._quarantine:
            page = self._quarantine.popleft()  # clean: goes to the free list
            self._dirty.discard(page)
            self._free.append(page)
            n += 1
        return n

    def scrub_some(self, limit: int) -> int:
        n = 0
        while self._quarantine:
            page = self._quarantine.popleft()  # leak: the page taken when the limit is reached is in neither list
            if n >= limit:
                break
            self._dirty.discard(page)
            self._free.append(page)
            n += 1
        return n

    def grow(self, by: int) -> None:
        self._free.extend(range(self.total, self.total + by))
        self.total += by


class PageTable:
    def __init__(self, heap: PageHeap, frames: torch.Tensor) -> None:
        self.heap = heap
        self.frames = frames
        self.map: dict[int, int] = {}
        self.clock: deque[int] = deque()

    def fault(self, vpn: int) -> int:
        if vpn in self.map:
            return self.map[vpn]
        page = self.heap.alloc_clean()  # clean: near miss, reassigned only after None, kept in map and unmap deallocates
        if page is None:
            self.evict_one()
            page = self.heap.alloc_page()  # clean: kept in map
        self.map[vpn] = page
        self.clock.append(vpn)
        return page

    def evict_one(self) -> None:
        vpn = self.clock.popleft()
        self.unmap(vpn)

    def unmap(self, vpn: int) -> None:
        page = self.map.pop(vpn, None)
        if page is not None:
            self.heap.dealloc_page(page)

    def map_range(self, start: int, n: int) -> bool:
        try:
            pages = self.heap.alloc_run(n)  # clean: all of them go in the map
        except PageError:
            return False
        for i, p in enumerate(pages):
            self.unmap(start + i)
            self.map[start + i] = p
        return True

    def zero_range(self, n: int) -> Iterator[int]:
        for p in self.heap.alloc_run(n):  # leak: zeroed pages are yielded, frozen ones passed over and lost
            if self.frames[p].isnan().any():
                logger.warning("page %d is frozen", p)
                continue
            self.frames[p].zero_()
            yield p

    def remap(self, vpn: int) -> int:
        new = self.heap.alloc_page()  # clean: near miss, old page deallocated before the entry is replaced
        old = self.map.get(vpn)
        if old is not None:
            self.frames[new].copy_(self.frames[old])
            self.heap.dealloc_page(old)
        self.map[vpn] = new
        return new

    def snapshot(self, vpns: list[int]) -> dict[int, torch.Tensor]:
        shots: dict[int, torch.Tensor] = {}
        for v in vpns:
            p = self.heap.alloc_page()  # leak: unmapped addresses are skipped after the allocation
            if v not in self.map:
                continue
            self.frames[p].copy_(self.frames[self.map[v]])
            shots[v] = self.frames[p].clone()
            self.heap.dealloc_page(p)
        return shots
