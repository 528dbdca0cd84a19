"""KV manager for hybrid models: a raw page allocator wrapped twice."""
import logging
from abc import ABC, abstractmethod
from typing import Dict, List, Optional, Sequence

log = logging.getLogger(__name__)


class OutOfPages(Exception):
    pass


class PageAllocator:
    def __init__(self, pages: int) -> None:
        self._stack = list(range(pages - 1, -1, -1))

    def alloc(self, n: int = 1) -> List[int]:
        if n > len(self._stack):
            raise OutOfPages(n)
        taken = self._stack[-n:]
        del self._stack[-n:]
        return taken

    def dealloc(self, pages: Sequence[int]) -> None:
        self._stack.extend(pages)


class CountingAllocator:
    """Adds accounting."""

    def __init__(self, inner: PageAllocator) -> None:
        self.inner = inner
        self.count = 0

    def alloc(self, n: int) -> List[int]:
        pages = self.inner.alloc(n)  # clean: passed through
        self.count += len(pages)
        return pages

    def dealloc(self, pages: Sequence[int]) -> None:
        self.count -= len(pages)
        self.inner.dealloc(pages)


class QuotaAllocator:
    def __init__(self, inner: CountingAllocator, quota: int) -> None:
        self.inner = inner
        self.quota = quota

    def alloc(self, n: int) -> Optional[List[int]]:
        pages = self.inner.alloc(n)  # leak: over quota it returns None and the pages are not given back to the inner allocator
        if self.inner.count > self.quota:
            return None
        return pages

    def alloc_quota(self, n: int) -> Optional[List[int]]:
        pages = self.inner.alloc(n)  # clean: near miss, over quota the inner allocator gets them back
        if self.inner.count > self.quota:
            self.inner.dealloc(pages)
            return None
        return pages

    def dealloc(self, pages: Sequence[int]) -> None:
        self.inner.dealloc(pages)


class GroupManager(ABC):
    def __init__(self, alloc: QuotaAllocator, page_size: int) -> None:
        self.alloc = alloc
        self.page_size = page_size
        self.tables: Dict[str, List[int]] = {}

    @abstractmethod
    def pages_needed(self, tokens: int) -> int: ...

    def ensure(self, rid: str, tokens: int) -> bool:
        table = self.tables.setdefault(rid, [])
        missing = self.pages_needed(tokens) - len(table)
        if missing <= 0:
            return True
        pages = self.alloc.alloc_quota(missing)  # clean: extends the request's table, free() empties it
        if pages is None:
            return False
        table.extend(pages)
        return True

    def free(self, rid: str) -> None:
        self.alloc.dealloc(self.tables.pop(rid, []))


class FullAttentionGroup(GroupManager):
    def pages_needed(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


class SlidingWindowGroup(GroupManager):
    def __init__(self, alloc: QuotaAllocator, page_size: int, window: int) -> None:
        super().__init__(alloc, page_size)
        self.window = window

    def pages_needed(self, tokens: int) -> int:
        return -(-min(tokens, self.window) // self.page_size)

    def restart(self, rid: str, tokens: int) -> bool:
        pages = self.alloc.alloc_quota(self.pages_needed(tokens))  # leak: an unknown request is refused after the pages are there
        if pages is None:
            return False
        old = self.tables.get(rid)
        if old is None:
            log.error("restart of unknown request %s", rid)
            return False
        self.alloc.dealloc(old)
        self.tables[rid] = pages
        return True

    def restart_from(self, rid: str, tokens: int) -> bool:
        self.free(rid)
        pages = self.alloc.alloc_quota(self.pages_needed(tokens))  # clean: near miss, the old entry was freed first
        if pages is None:
            return False
        self.tables[rid] = pages
        return True

    def slide(self, rid: str) -> int:
        """Replaces the page that left the window; returns the new page."""
        fresh = self.alloc.alloc_quota(1)  # clean: takes the place of the freed first page
        if fresh is None:
            return -1
        table = self.tables[rid]
        self.alloc.dealloc([table.pop(0)])
        table.extend(fresh)
        return fresh[0]


class HybridManager:
    def __init__(self, full: FullAttentionGroup, swa: SlidingWindowGroup) -> None:
        self.full = full
        self.swa = swa

    def allocate(self, rid: str, tokens: int) -> bool:
        if not self.full.ensure(rid, tokens):
            return False
        if not self.swa.ensure(rid, tokens):
            self.full.free(rid)
            self.swa.free(rid)
            return False
        return True

    def scratch(self, n: int) -> int:
        pages = self.full.alloc.alloc(n)  # leak: more than four pages are only freed up to the fourth
        if not pages:
            return 0
        self.full.alloc.dealloc(pages[:4])
        return len(pages)

    def bench(self, n: int) -> bool:
        raw = self.full.alloc.inner.inner
        try:
            pages = raw.alloc(n)  # clean: near miss, OutOfPages means nothing was taken
        except OutOfPages:
            return False
        raw.dealloc(pages)
        return True

    def fits(self, a: int, b: int) -> bool:
        raw = self.full.alloc.inner
        try:
            first = raw.alloc(a)  # leak: when the second does not fit the handler forgets the first
            second = raw.alloc(b)  # clean: deallocated with the first
        except OutOfPages:
            return False
        raw.dealloc(first + second)
        return True
