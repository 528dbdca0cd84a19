"""Message tags. A tag is exclusive between two ranks until it is retired."""
from __future__ import annotations


class TagSpace:
    def __init__(self, first: int, size: int):
        self.first = first
        self.size = size
        self._mask = 0

    def mint(self) -> int:
        inv = ~self._mask & ((1 << self.size) - 1)
        if inv == 0:
            raise RuntimeError("tag space is exhausted")
        low = inv & -inv
        self._mask |= low
        return self.first + low.bit_length() - 1

    def retire(self, tag: int) -> None:
        self._mask &= ~(1 << (tag - self.first))
