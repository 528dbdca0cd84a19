"""KV page accounting used by the scheduler."""
from __future__ import annotations

from typing import List, Optional


class PageError(Exception):
    pass


class PageTable:
    def __init__(self, total: int, page_size: int) -> None:
        self.page_size = page_size
        self._free: List[int] = list(range(total))

    def grab(self, n: int) -> List[int]:
        if n > len(self._free):
            raise PageError(f"need {n}, have {len(self._free)}")
        out = self._free[:n]
        del self._free[:n]
        return out

    def release(self, pages: List[int]) -> None:
        self._free.extend(pages)


class PageManager:
    """Adds the page-count arithmetic and the None convention over PageTable."""

    def __init__(self, table: PageTable, reserve: int) -> None:
        self.table = table
        self.reserve = reserve

    def pages_needed(self, tokens: int) -> int:
        return -(-tokens // self.table.page_size)

    def grab_for(self, tokens: int) -> Optional[List[int]]:
        n = self.pages_needed(tokens) + self.reserve
        try:
            return self.table.grab(n)  # clean: handed on
        except PageError:
            return None

    def grow(self, pages: List[int], tokens: int) -> bool:
        need = self.pages_needed(tokens) - len(pages)
        if need <= 0:
            return True
        try:
            pages.extend(self.table.grab(need))  # clean: near miss, joins the caller's list
        except PageError:
            return False
        return True

    def release(self, pages: List[int]) -> None:
        self.table.release(pages)
