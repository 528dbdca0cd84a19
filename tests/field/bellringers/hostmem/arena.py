"""A bump-and-coalesce arena over one pinned allocation."""
import bisect
from typing import List, NamedTuple, Optional

import torch


class Region(NamedTuple):
    off: int
    size: int


class Arena:
    """Holes are kept sorted by offset. cut() is None if no hole is large enough."""

    def __init__(self, size: int) -> None:
        self.store = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._holes: List[Region] = [Region(0, size)]

    def cut(self, size: int) -> Optional[Region]:
        for i, hole in enumerate(self._holes):
            if hole.size < size:
                continue
            if hole.size == size:
                del self._holes[i]
            else:
                self._holes[i] = Region(hole.off + size, hole.size - size)
            return Region(hole.off, size)
        return None

    def cut_aligned(self, size: int, align: int) -> Optional[Region]:
        r = self.cut(size + align)  # leak: the slack before and after the aligned part is not filled in
        if r is None:
            return None
        off = -(-r.off // align) * align
        return Region(off, size)

    def fill(self, r: Region) -> None:
        i = bisect.bisect(self._holes, r)
        self._holes.insert(i, r)
        self._merge(i)

    def _merge(self, i: int) -> None:
        while i + 1 < len(self._holes) and self._holes[i].off + self._holes[i].size == self._holes[i + 1].off:
            nxt = self._holes.pop(i + 1)
            self._holes[i] = Region(self._holes[i].off, self._holes[i].size + nxt.size)
        if i > 0 and self._holes[i - 1].off + self._holes[i - 1].size == self._holes[i].off:
            cur = self._holes.pop(i)
            self._holes[i - 1] = Region(self._holes[i - 1].off, self._holes[i - 1].size + cur.size)

    def tensor(self, r: Region) -> torch.Tensor:
        return self.store[r.off:r.off + r.size]
