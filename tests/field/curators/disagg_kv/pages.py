from __future__ import annotations

from collections import deque
from typing import Deque, List, Optional


class PageAllocator:
    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._free: Deque[int] = deque(range(pages))

    def available(self) -> int:
        return len(self._free)

    def alloc(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        return [self._free.popleft() for _ in range(n)]

    def alloc_upto(self, n: int) -> List[int]:
        return [self._free.popleft() for _ in range(min(n, len(self._free)))]

    def free(self, pages: List[int]) -> None:
        self._free.extend(pages)


class MetaBuffers:
    """Small rows that carry the first token and logprobs next to the KV."""

    def __init__(self, rows: int) -> None:
        self._rows: Deque[int] = deque(range(rows))
        self.data: List[int] = [0] * rows

    def alloc_row(self) -> Optional[int]:
        return self._rows.popleft() if self._rows else None

    def free_row(self, row: int) -> None:
        self.data[row] = 0
        self._rows.append(row)
