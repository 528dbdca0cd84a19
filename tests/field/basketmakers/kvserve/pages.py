"""Physical pages and the quota put in front of them."""
from __future__ import annotations

from typing import Optional

PageId = int


class PagePool:
    def __init__(self, total: int):
        self._free: list[PageId] = list(range(total))
        self.total = total

    def allot(self) -> Optional[PageId]:
        return self._free.pop() if self._free else None

    def yield_back(self, page: PageId) -> None:
        self._free.append(page)

    def idle(self) -> int:
        return len(self._free)


class QuotaPages:
    """Per-tenant quota over a shared pool, with the same two methods."""

    def __init__(self, inner: PagePool, quota: int):
        self.inner = inner
        self.quota = quota
        self.used = 0

    def allot(self) -> Optional[PageId]:
        if self.used >= self.quota:
            return None
        page = self.inner.allot()  # clean: returned to the caller and counted in used
        if page is not None:
            self.used += 1
        return page

    def yield_back(self, page: PageId) -> None:
        self.used -= 1
        self.inner.yield_back(page)

    def allot_below(self, bound: int) -> Optional[PageId]:
        """A page with an id under bound, for the windows mapped by the NIC."""
        for _ in range(4):
            page = self.inner.allot()  # leak: pages at or over the bound are not yielded back to the inner pool
            if page is None:
                return None
            if page < bound:
                self.used += 1
                return page
        return None
