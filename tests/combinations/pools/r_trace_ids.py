# take: P.mint()
# give: P.melt(X)
# gets: value
# type: HandleMint
from collections import deque
from typing import NamedTuple


class Handle(NamedTuple):
    index: int
    gen: int


class StaleHandle(Exception):
    pass


class MintExhausted(Exception):
    pass


class HandleMint:
    """Sequence handles for the scheduler wire protocol: (index, generation)."""

    def __init__(self, bits=10):
        self.gens = [0] * (1 << bits)
        self._cold = deque(range(1 << bits))

    def _check(self, h):
        if self.gens[h.index] != h.gen or h.gen % 2 == 0:
            raise StaleHandle(h)

    def mint(self):
        if not self._cold:
            raise MintExhausted(len(self.gens))
        i = self._cold.popleft()
        self.gens[i] += 1        # odd: alive
        return Handle(i, self.gens[i])

    def melt(self, h):
        self._check(h)
        self.gens[h.index] += 1  # even: dead
        self._cold.append(h.index)
