from __future__ import annotations

from typing import Dict, List, Optional


class BlockManager:
    """KV blocks with a count of users each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free = list(range(num_blocks))
        self._refs: Dict[int, int] = {}

    def alloc(self) -> Optional[int]:
        if not self._free:
            return None
        blk = self._free.pop()
        self._refs[blk] = 1
        return blk

    def alloc_n(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        return [self.alloc() for _ in range(n)]  # clean: near miss, the size was checked, all go to the caller

    def incref(self, blk: int) -> None:
        self._refs[blk] += 1

    def free(self, blk: int) -> None:
        self._refs[blk] -= 1
        if self._refs[blk] == 0:
            del self._refs[blk]
            self._free.append(blk)

    def free_all(self, blks: List[int]) -> None:
        for blk in blks:
            self.free(blk)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    @property
    def used(self) -> int:
        return len(self._refs)
