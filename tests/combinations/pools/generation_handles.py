# take: P.spawn()
# give: P.expire(X)
# gets: optional
# type: SequenceHandles
from typing import NamedTuple


class SeqHandle(NamedTuple):
    idx: int
    gen: int


class SequenceHandles:
    """Even generation: slot idle. Odd: live. Stale handles never match."""

    def __init__(self, max_seqs):
        self._gen = [0] * max_seqs

    def alive(self, h):
        return self._gen[h.idx] == h.gen

    def spawn(self):
        for idx, gen in enumerate(self._gen):
            if gen % 2 == 0:
                self._gen[idx] = gen + 1
                return SeqHandle(idx, gen + 1)
        return None

    def expire(self, h):
        if not self.alive(h):
            raise KeyError(f"stale handle {h}")
        self._gen[h.idx] += 1
