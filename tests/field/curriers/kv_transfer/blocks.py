"""Paged KV blocks on the local device."""
from __future__ import annotations

from typing import List, Optional


class BlockAllocator:
    def __init__(self, n_blocks: int) -> None:
        self._free: List[int] = list(range(n_blocks))

    def alloc(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        out, self._free = self._free[:n], self._free[n:]
        return out

    def free(self, blocks: List[int]) -> None:
        self._free.extend(blocks)

    def available(self) -> int:
        return len(self._free)
