from __future__ import annotations

from typing import Optional


class Block:
    __slots__ = ("index", "ref", "digest")

    def __init__(self, index: int) -> None:
        self.index = index
        self.ref = 0
        self.digest: Optional[int] = None


class BlockAllocator:
    """Reference-counted physical blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._free = [Block(i) for i in range(num_blocks)]
        self.num_blocks = num_blocks

    def alloc(self) -> Optional[Block]:
        if not self._free:
            return None
        b = self._free.pop()
        b.ref = 1
        b.digest = None
        return b

    def incref(self, b: Block) -> None:
        b.ref += 1

    def decref(self, b: Block) -> None:
        b.ref -= 1
        if b.ref == 0:
            self._free.append(b)

    def cow(self, b: Block) -> Optional[Block]:
        """Writable version of b: b itself, or a new block in exchange for it."""
        if b.ref == 1:
            return b
        fresh = self.alloc()  # clean: returned in exchange for one count of b
        if fresh is None:
            return None
        self.decref(b)
        return fresh

    def free_blocks(self) -> int:
        return len(self._free)
