"""Pools with eviction: the store itself is a free list plus an LRU of reusable pages."""
from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Iterator

logger = logging.getLogger(__name__)


@dataclass
class Page:
    number: int
    tag: str | None = None
    stamp: float = 0.0
    bad: bool = False


class EvictingPool:
    def __init__(self, n: int, ttl: float) -> None:
        self.ttl = ttl
        self._free: list[Page] = [Page(i) for i in range(n)]
        self._lru: OrderedDict[str, Page] = OrderedDict()

    def get_page(self) -> Page | None:
        if self._free:
            return self._free.pop()
        if self._lru:
            _, page = self._lru.popitem(last=False)  # clean: reset and handed out
            page.tag = None
            return page
        return None

    def get_good_page(self) -> Page | None:
        while self._free:
            page = self._free.pop()  # leak: a bad page is passed over and stays outside the pool
            if page.bad:
                continue
            return page
        return None

    def get_good_page_scan(self) -> Page | None:
        bad: list[Page] = []
        found = None
        while self._free:
            page = self._free.pop()  # clean: near miss, the bad ones are collected and put back
            if not page.bad:
                found = page
                break
            bad.append(page)
        self._free.extend(bad)
        return found

    def get_expired(self, now: float) -> Page | None:
        if not self._lru:
            return None
        tag, page = self._lru.popitem(last=False)  # leak: a page that has not expired yet is out of the LRU and not returned
        if now - page.stamp < self.ttl:
            logger.debug("%s is still fresh", tag)
            return None
        return page

    def get_expired_or_wait(self, now: float) -> Page | None:
        if not self._lru:
            return None
        tag, page = self._lru.popitem(last=False)  # clean: near miss, a fresh page goes back to the front
        if now - page.stamp < self.ttl:
            self._lru[tag] = page
            self._lru.move_to_end(tag, last=False)
            return None
        return page

    def put_page(self, page: Page, reusable: bool = False) -> None:
        if reusable and page.tag is not None and page.tag not in self._lru:
            page.stamp = time.monotonic()
            self._lru[page.tag] = page
        else:
            page.tag = None
            self._free.append(page)

    def get_pages(self, n: int) -> list[Page]:
        pages: list[Page] = []
        while len(pages) < n:
            page = self.get_page()  # leak: when the store runs out the list of the ones taken is dropped
            if page is None:
                raise MemoryError(f"{n} pages wanted, {len(pages)} found")
            pages.append(page)
        return pages

    def get_pages_or_none(self, n: int) -> list[Page] | None:
        pages: list[Page] = []
        while len(pages) < n:
            page = self.get_page()  # clean: near miss, all go back before None is returned
            if page is None:
                for p in pages:
                    self.put_page(p)
                return None
            pages.append(page)
        return pages

    def evict_tagged(self, prefix: str) -> int:
        tags = [t for t in self._lru if t.startswith(prefix)]
        for t in tags:
            page = self._lru.pop(t)  # clean: moved to the free list
            page.tag = None
            self._free.append(page)
        return len(tags)

    def invalidate_tagged(self, prefix: str) -> int:
        n = 0
        for t in list(self._lru):
            if t.startswith(prefix):
                self._lru.pop(t)  # leak: the page is in neither the LRU nor the free list
                n += 1
        return n

    def __iter__(self) -> Iterator[Page]:
        yield from self._free
        yield from self._lru.values()


class PageUser:
    def __init__(self, pool: EvictingPool) -> None:
        self.pool = pool
        self.pages: list[Page] = []

    def fill(self, tags: list[str]) -> int:
        for i, tag in enumerate(tags):
            page = self.pool.get_page()  # clean: kept in pages, close() puts them back
            if page is None:
                return i
            page.tag = tag
            self.pages.append(page)
        return len(tags)

    def close(self, keep: bool = True) -> None:
        for p in self.pages:
            self.pool.put_page(p, reusable=keep)
        self.pages.clear()

    def checksum(self, n: int) -> int:
        pages = self.pool.get_pages(n)  # clean: put back one by one
        total = sum(p.number for p in pages)
        while pages:
            self.pool.put_page(pages.pop())
        return total

    def longest_run(self, n: int) -> int:
        pages = self.pool.get_pages_or_none(n)  # leak: gaps end the count early and the pages are not put back then
        if pages is None:
            return 0
        run = 1
        for a, b in zip(pages, pages[1:]):
            if b.number != a.number + 1:
                return run
            run += 1
        for p in pages:
            self.pool.put_page(p)
        return run
