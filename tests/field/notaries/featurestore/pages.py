"""A page table with pin counts. A page with pins is not evicted."""
from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass
class Page:
    key: str
    rows: list[list[float]]
    pins: int = 0


class PageTable:
    def __init__(self, backend, capacity: int) -> None:
        self.backend = backend
        self.capacity = capacity
        self._pages: OrderedDict[str, Page] = OrderedDict()

    def pin(self, key: str) -> Page:
        page = self._pages.get(key)
        if page is None:
            self._make_room()
            page = Page(key, self.backend.load(key))
            self._pages[key] = page
        page.pins += 1
        self._pages.move_to_end(key)
        return page

    def unpin(self, page: Page) -> None:
        if page.pins <= 0:
            raise ValueError(f"page {page.key} is not pinned")
        page.pins -= 1

    def _make_room(self) -> None:
        if len(self._pages) < self.capacity:
            return
        for key, page in self._pages.items():
            if page.pins == 0:
                del self._pages[key]
                return
        raise MemoryError("all pages are pinned")


TABLE: PageTable | None = None


def configure(backend, capacity: int) -> PageTable:
    global TABLE
    TABLE = PageTable(backend, capacity)
    return TABLE
