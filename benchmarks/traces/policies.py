"""Simulated pools to stand beside ours: the same trace, the same limit, other rules. They count bytes and
hold none.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict


class Simulated:
    """Separate blocks, least recently used first out, under a limit. A policy is a rounding and a bound on
    the fit.
    """

    def __init__(
        self, name: str, limit: int, *, power_of_two: bool = False, any_larger: bool = False
    ) -> None:
        self.name = name
        self.limit = limit
        self._power_of_two = power_of_two
        self._any_larger = any_larger
        self._idle: OrderedDict[int, int] = OrderedDict()
        """Block number to size, oldest first."""
        self._by_size: dict[int, list[int]] = {}
        self._sizes: list[int] = []
        self._out: dict[int, tuple[int, int]] = {}
        self._blocks = 0
        self.live = self.reserved = self.peak_live = self.peak_reserved = 0
        self.hits = self.misses = self.refused = self.evictions = 0
        self.requested = self.served = 0

    def allocate(self, number: int, nbytes: int) -> None:
        """Serve a request, or count it as refused."""
        size = 1 << (nbytes - 1).bit_length() if self._power_of_two else nbytes
        block = self._reuse(size)
        if block is None:
            while self.reserved + size > self.limit and self._idle:
                self._evict()
            if self.reserved + size > self.limit:
                self.refused += 1
                return
            self.misses += 1
            self._blocks += 1
            block = self._blocks, size
            self.reserved += size
        else:
            self.hits += 1
        self._out[number] = block
        self.live += nbytes
        self.requested += nbytes
        self.served += block[1]
        self.peak_live = max(self.peak_live, self.live)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def free(self, number: int, nbytes: int) -> None:
        """Take the block back; nothing where the request was refused."""
        block = self._out.pop(number, None)
        if block is None:
            return
        self.live -= nbytes
        made, size = block
        self._idle[made] = size
        if size not in self._by_size:
            self._by_size[size] = []
            insort(self._sizes, size)
        self._by_size[size].append(made)

    def _reuse(self, size: int) -> tuple[int, int] | None:
        found = size if size in self._by_size else None
        if found is None and self._any_larger:
            at = bisect_left(self._sizes, size)
            found = self._sizes[at] if at < len(self._sizes) else None
        if found is None:
            return None
        made = self._by_size[found][-1]
        del self._idle[made]
        self._drop(made, found)
        return made, found

    def _evict(self) -> None:
        made, size = self._idle.popitem(last=False)
        self._drop(made, size)
        self.reserved -= size
        self.evictions += 1

    def _drop(self, made: int, size: int) -> None:
        self._by_size[size].remove(made)
        if not self._by_size[size]:
            del self._by_size[size]
            del self._sizes[bisect_left(self._sizes, size)]

    def figures(self) -> dict[str, float]:
        """The same figures as ours."""
        return {
            "hits": self.hits,
            "misses": self.misses,
            "refused": self.refused,
            "evictions": self.evictions,
            "reserve_overhead": 1 - self.peak_live / self.peak_reserved,
            "internal": 1 - self.requested / self.served,
        }


def all_policies(limit: int) -> list[Simulated]:
    """The peers."""
    return [
        Simulated("exact-fit LRU", limit),
        Simulated("power-of-two LRU", limit, power_of_two=True),
        Simulated("best-fit LRU, any waste", limit, any_larger=True),
    ]
