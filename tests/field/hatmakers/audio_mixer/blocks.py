"""Sample blocks of one fixed length, recycled through a ring so that the audio callback never allocates."""
from __future__ import annotations

import array
import threading
from typing import Optional


class Block:
    __slots__ = ("samples", "refs", "ring")

    def __init__(self, ring: "BlockRing", length: int) -> None:
        self.samples = array.array("f", bytes(4 * length))
        self.refs = 0
        self.ring = ring

    def retain(self) -> "Block":
        self.refs += 1
        return self

    def drop(self) -> None:
        self.refs -= 1
        if self.refs == 0:
            self.ring.recycle(self)

    def gain(self, factor: float) -> None:
        for i, value in enumerate(self.samples):
            self.samples[i] = value * factor

    def add(self, other: "Block") -> None:
        for i, value in enumerate(other.samples):
            self.samples[i] += value

    def peak(self) -> float:
        return max((abs(v) for v in self.samples), default=0.0)


class BlockRing:
    def __init__(self, count: int, length: int) -> None:
        self.length = length
        self._lock = threading.Lock()
        self._spare = [Block(self, length) for _ in range(count)]

    def fetch(self) -> Optional[Block]:
        """A silent block with one reference, or None."""
        with self._lock:
            if not self._spare:
                return None
            block = self._spare.pop()
        block.refs = 1
        for i in range(self.length):
            block.samples[i] = 0.0
        return block

    def fetch_pair(self) -> Optional[tuple[Block, Block]]:
        left = self.fetch()  # clean: near miss, dropped where the second is missing, else handed on
        if left is None:
            return None
        right = self.fetch()  # clean: handed on in the pair
        if right is None:
            left.drop()
            return None
        return left, right

    def recycle(self, block: Block) -> None:
        with self._lock:
            self._spare.append(block)
