"""KV page pool used by both sides of the disaggregated deployment."""
from __future__ import annotations

import threading
from typing import Iterable, List, Optional, Sequence


class PageList(list):
    """Page numbers of one request."""


class PagePool:
    def __init__(self, num_pages: int) -> None:
        self._mutex = threading.Lock()
        self._free: List[int] = list(range(num_pages))

    def alloc_pages(self, n: int) -> Optional[PageList]:
        with self._mutex:
            if n > len(self._free):
                return None
            taken, self._free = self._free[:n], self._free[n:]
            return PageList(taken)

    def free_pages(self, pages: Iterable[int]) -> None:
        with self._mutex:
            self._free.extend(pages)

    def available(self) -> int:
        return len(self._free)


def alloc_or_raise(pool: PagePool, n: int) -> PageList:
    pages = pool.alloc_pages(n)  # clean: near miss, raises only when there are no pages, otherwise returns them
    if pages is None:
        raise MemoryError(f"{n} pages wanted, {pool.available()} free")
    return pages


def round_up(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def split(pages: Sequence[int], head: int) -> tuple:
    return pages[:head], pages[head:]
