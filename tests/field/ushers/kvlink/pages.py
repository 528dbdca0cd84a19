from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Optional


@dataclass(eq=False)
class Page:
    index: int
    offset: int
    refs: int = 0
    dropped: bool = False


class PageAllocator:
    def __init__(self, count: int, page_bytes: int) -> None:
        self._lock = threading.Lock()
        self._free = [Page(i, i * page_bytes) for i in range(count)]
        self.page_bytes = page_bytes

    def allocate(self) -> Optional[Page]:
        with self._lock:
            if not self._free:
                return None
            page = self._free.pop()
            page.refs = 1
            return page

    def batched_allocate(self, n: int) -> Optional[list[Page]]:
        with self._lock:
            if len(self._free) < n:
                return None
            split = len(self._free) - n
            taken, self._free = self._free[split:], self._free[:split]
            for page in taken:
                page.refs = 1
            return taken

    def ref_up(self, page: Page) -> None:
        with self._lock:
            page.refs += 1

    def ref_down(self, page: Page) -> None:
        with self._lock:
            page.refs -= 1
            if page.refs == 0:
                self._free.append(page)
