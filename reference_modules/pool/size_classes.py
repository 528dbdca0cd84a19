"""How large a new block is and which idle block may serve a request: a fine grid, plus the sizes really seen.

The grid has 16 steps an octave and an idle block may be one sixteenth larger than the request, so no lease
wastes more than 1/17 (5.9 %) of its block, whatever the sizes (powers of two: 50 %). A size that comes again
gets blocks of exactly that size: a training step repeats its few sizes for ever and then wastes nothing,
while lengths that vary share the grid's blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reference_modules.pool.blocks import Block

GRAIN = 64
"""Blocks are multiples of this, so that every block ends on a cache line."""
STEPS_BITS = 4
"""Grid steps an octave, as a power of two."""
REMEMBERED = 256
"""Distinct sizes remembered; beyond it the ones seen once are forgotten."""
OFTEN = 2
"""Seen this often, a size gets blocks of its own."""


def grid_size(nbytes: int) -> int:
    """The request rounded up to the grid: at most one sixteenth of its octave more."""
    shift = max(nbytes.bit_length() - 1 - STEPS_BITS, GRAIN.bit_length() - 1)
    return -(-nbytes >> shift) << shift


def grain_size(nbytes: int) -> int:
    """The request rounded up to a cache line: the closest block there is."""
    return -(-nbytes // GRAIN) * GRAIN


class SizeClass:
    """Blocks of one size: the idle ones, oldest first, and what the class has served."""

    __slots__ = ("blocks", "hits", "idle", "misses", "requested", "served", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.idle: deque[Block] = deque()
        self.blocks = 0
        self.hits = 0
        self.misses = 0
        self.requested = 0
        self.served = 0


class SizeClasses:
    """All classes of one store, ordered by size."""

    def __init__(self) -> None:
        self._classes: dict[int, SizeClass] = {}
        self._sizes: list[int] = []
        self._seen: dict[int, int] = {}
        self.requested = 0
        self.served = 0

    def of(self, size: int) -> SizeClass:
        """The class of exactly this block size, made when first asked for."""
        found = self._classes.get(size)
        if found is None:
            found = self._classes[size] = SizeClass(size)
            insort(self._sizes, size)
        return found

    def size_for(self, nbytes: int) -> int:
        """The size of a new block for this request."""
        return grain_size(nbytes) if self._seen.get(nbytes, 0) >= OFTEN else grid_size(nbytes)

    def fit(self, nbytes: int, slack: int) -> SizeClass | None:
        """The smallest class with an idle block for this request that wastes at most `slack` bytes of it."""
        self._remember(nbytes)
        exact = self._classes.get(grain_size(nbytes))
        if exact is not None and exact.idle:
            return exact
        most = nbytes + max(min(slack, nbytes >> STEPS_BITS), GRAIN)
        sizes = self._sizes
        for at in range(bisect_left(sizes, nbytes), len(sizes)):
            if sizes[at] > most:
                return None
            found = self._classes[sizes[at]]
            if found.idle:
                return found
        return None

    def served_by(self, found: SizeClass, nbytes: int, *, hit: bool) -> None:
        """Count one lease of this class."""
        found.hits += hit
        found.misses += not hit
        found.requested += nbytes
        found.served += found.size
        self.requested += nbytes
        self.served += found.size

    def drop(self, block: Block) -> None:
        """The block left; a class off the grid goes with its last block, its figures to the grid's."""
        found = block.size_class
        found.blocks -= 1
        home = grid_size(found.size)
        if found.blocks or home == found.size:
            return
        del self._classes[found.size]
        del self._sizes[bisect_left(self._sizes, found.size)]
        heir = self.of(home)
        heir.hits += found.hits
        heir.misses += found.misses
        heir.requested += found.requested
        heir.served += found.served

    def report(self) -> list[dict[str, float]]:
        """Hits, misses and waste of every class that served something, by size."""
        classes = (self._classes[size] for size in self._sizes)
        return [_row(found) for found in classes if found.hits or found.misses]

    def state(self) -> tuple[object, ...]:
        """What future decisions depend on, for the replayer's proof that a repeated trace stays as it is."""
        return tuple(sorted(self._seen.items()))

    def _remember(self, nbytes: int) -> None:
        seen = self._seen.get(nbytes, 0)
        if seen >= OFTEN:
            return
        if not seen and len(self._seen) >= REMEMBERED:
            self._forget()
        self._seen[nbytes] = seen + 1

    def _forget(self) -> None:
        kept = {size: OFTEN - 1 for size, seen in self._seen.items() if seen >= OFTEN}
        self._seen = kept if len(kept) < REMEMBERED // 2 else {}


def _row(found: SizeClass) -> dict[str, float]:
    return {
        "block_bytes": found.size,
        "blocks": found.blocks,
        "idle": len(found.idle),
        "hits": found.hits,
        "misses": found.misses,
        "waste": 1.0 - found.requested / found.served,
    }
