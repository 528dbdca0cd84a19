"""Radix-style prefix cache over reference counted KV pages."""
from __future__ import annotations

import heapq
import itertools
import threading
import time
from dataclasses import dataclass, field

PageHash = int


@dataclass
class Page:
    index: int
    ref: int = 0
    hash: PageHash | None = None
    last_access: float = 0.0


@dataclass
class PrefillRequest:
    rid: str
    tokens: list[int]
    pages: list[Page] = field(default_factory=list)
    cached_len: int = 0


class PagePool:
    """Pages with reference counts; a page returns to the heap at zero."""

    def __init__(self, num_pages: int) -> None:
        self._pages = [Page(i) for i in range(num_pages)]
        self._free = list(range(num_pages))
        heapq.heapify(self._free)

    def get(self) -> Page | None:
        if not self._free:
            return None
        page = self._pages[heapq.heappop(self._free)]  # clean: the page goes to the caller with one reference
        page.ref = 1
        page.hash = None
        page.last_access = time.monotonic()
        return page

    def incref(self, page: Page) -> Page:
        page.ref += 1
        page.last_access = time.monotonic()
        return page

    def decref(self, page: Page) -> None:
        page.ref -= 1
        if page.ref == 0:
            heapq.heappush(self._free, page.index)

    def __len__(self) -> int:
        return len(self._free)


def page_hashes(tokens: list[int], page_size: int) -> list[PageHash]:
    """Chained hashes of all full pages."""
    hashes: list[PageHash] = []
    prev = 0
    for start in range(0, len(tokens) - page_size + 1, page_size):
        prev = hash((prev, tuple(tokens[start:start + page_size])))
        hashes.append(prev)
    return hashes


class PrefixCache:
    """Maps page hashes to pages. Each entry owns one reference."""

    def __init__(self, pool: PagePool, page_size: int = 16) -> None:
        self.pool = pool
        self.page_size = page_size
        self._lock = threading.Lock()
        self._entries: dict[PageHash, Page] = {}
        self.hits = 0
        self.lookups = 0

    def _lookup(self, key: PageHash) -> Page | None:
        page = self._entries.get(key)
        if page is None:
            return None
        self.hits += 1
        return self.pool.incref(page)  # clean: the reference goes to the caller

    def match(self, req: PrefillRequest) -> int:
        """Attach the cached prefix pages to the request."""
        with self._lock:  # clean: scoped
            for key in page_hashes(req.tokens, self.page_size):
                self.lookups += 1
                page = self._lookup(key)  # clean: near miss, None ends the loop, otherwise the request holds it until release()
                if page is None:
                    break
                req.pages.append(page)
        req.cached_len = len(req.pages) * self.page_size
        return req.cached_len

    def match_length(self, tokens: list[int]) -> int:
        """Length of the cached prefix, for the router's cache score."""
        n = 0
        for key in page_hashes(tokens, self.page_size):
            page = self._lookup(key)  # leak: the score only needs the count, the reference is not dropped
            if page is None:
                break
            n += self.page_size
        return n

    def extend(self, req: PrefillRequest) -> bool:
        """Add fresh pages until the request's tokens fit."""
        need = -(-len(req.tokens) // self.page_size) - len(req.pages)
        fresh: list[Page] = []
        for _ in range(need):
            page = self.pool.get()  # clean: near miss, a failed extension gives back what it took
            if page is None:
                for p in fresh:
                    self.pool.decref(p)
                return False
            fresh.append(page)
        req.pages += fresh
        return True

    def insert(self, req: PrefillRequest) -> int:
        """Publish the full pages of a finished prefill."""
        added = 0
        with self._lock:  # clean: scoped
            for key, page in zip(page_hashes(req.tokens, self.page_size), req.pages):
                entry = self.pool.incref(page)  # leak: the continue for a hash already published keeps the extra reference
                if key in self._entries:
                    continue
                entry.hash = key
                self._entries[key] = entry
                added += 1
        return added

    def pin_system_prompt(self, tokens: list[int], upload) -> list[Page]:
        """Upload a system prompt and return its pages, one reference each."""
        pinned: list[Page] = []
        for start, key in zip(itertools.count(0, self.page_size), page_hashes(tokens, self.page_size)):
            page = self._lookup(key)  # clean: returned in the list
            if page is None:
                page = self.pool.get()  # leak: a rejected upload ends the loop with the new page outside the list
                if page is None:
                    break
                if not upload(page.index, tokens[start:start + self.page_size]):
                    break
            pinned.append(page)
        return pinned

    def evict(self, target: int) -> int:
        """Drop entries nobody else uses, oldest first."""
        with self._lock:  # clean: scoped
            idle = sorted((p for p in self._entries.values() if p.ref == 1), key=lambda p: p.last_access)
            for page in idle[:target]:
                del self._entries[page.hash]
                self.pool.decref(page)
        return min(target, len(idle))

    def release(self, req: PrefillRequest) -> None:
        for page in req.pages:
            self.pool.decref(page)
        req.pages = []


def warm_up(cache: PrefixCache, prompts: list[list[int]], upload) -> int:
    """Touch the usual system prompts after start."""
    done = 0
    for tokens in prompts:
        pages = cache.pin_system_prompt(tokens, upload)  # leak: after a partial upload the continue skips the decref
        if len(pages) * cache.page_size < len(tokens) - cache.page_size:
            continue
        for page in pages:
            cache.pool.decref(page)
        done += 1
    return done
