from __future__ import annotations

from typing import Dict, List, Optional


class PageRun:
    """A counted run of pages; several sequences of one request may share it."""

    __slots__ = ("pages", "refs")

    def __init__(self, pages: List[int]) -> None:
        self.pages = pages
        self.refs = 1


class PageAllocator:
    def __init__(self, total: int) -> None:
        self._avail: List[int] = list(range(total))
        self.total = total

    @property
    def available(self) -> int:
        return len(self._avail)

    def grab(self, n: int) -> Optional[PageRun]:
        if n > len(self._avail):
            return None
        pages, self._avail = self._avail[:n], self._avail[n:]
        return PageRun(pages)

    def ref(self, run: PageRun) -> PageRun:
        run.refs += 1
        return run

    def unref(self, run: PageRun) -> None:
        run.refs -= 1
        if run.refs == 0:
            self._avail.extend(run.pages)
