"""Pages of the KV cache."""
from __future__ import annotations

from typing import List, Optional


class PagePool:
    def __init__(self, pages: int) -> None:
        self._free: List[int] = list(range(pages))

    def available(self) -> int:
        return len(self._free)

    def alloc(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        pages = self._free[:n]
        del self._free[:n]
        return pages

    def free(self, pages: List[int]) -> None:
        self._free.extend(pages)
