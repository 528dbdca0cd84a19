"""Token-granular KV slots."""
from __future__ import annotations

from typing import Optional


class TokenSlots:
    """One slot per token in the KV tensors. Ranges are given out as plain lists of indices."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size))
        self._deferred: list[list[int]] = []
        self._grouping = False

    def available(self) -> int:
        return len(self._free)

    def alloc(self, n: int) -> Optional[list[int]]:
        if n > len(self._free):
            return None
        out, self._free = self._free[:n], self._free[n:]
        return out

    def free(self, idx: list[int]) -> None:
        if self._grouping:
            self._deferred.append(idx)
        else:
            self._free.extend(idx)

    def group_begin(self) -> None:
        self._grouping = True
        self._deferred = []

    def group_end(self) -> None:
        self._grouping = False
        for idx in self._deferred:
            self._free.extend(idx)
        self._deferred = []
