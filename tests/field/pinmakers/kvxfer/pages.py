"""Pages of a registered KV region, kept in a set of free numbers."""
from __future__ import annotations

import threading
from typing import List, Optional

import torch


class PageBook:
    def __init__(self, pages: int, page_elems: int):
        self.region = torch.zeros(pages, page_elems)
        self._free = set(range(pages))
        self._mutex = threading.Lock()

    def draw(self, n: int) -> Optional[List[int]]:
        with self._mutex:
            if len(self._free) < n:
                return None
            return [self._free.pop() for _ in range(n)]

    def draw_some(self, n: int) -> List[int]:
        """Up to n pages."""
        out: List[int] = []
        with self._mutex:
            while self._free and len(out) < n:
                out.append(self._free.pop())
        return out

    def lay_back(self, pages: List[int]) -> None:
        with self._mutex:
            self._free.update(pages)


class Reservation:
    """Pages drawn for a transfer; cancel() lays back what commit() has not handed on."""

    def __init__(self, book: PageBook, n: int):
        self.book = book
        self.pages = book.draw(n)  # clean: commit() hands the pages on and cancel() lays them back

    def commit(self) -> List[int]:
        pages, self.pages = self.pages, None
        return pages

    def cancel(self) -> None:
        if self.pages is not None:
            self.book.lay_back(self.pages)
            self.pages = None

    def __bool__(self) -> bool:
        return self.pages is not None
