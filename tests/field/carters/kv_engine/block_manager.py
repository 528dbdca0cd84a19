from __future__ import annotations

from collections import deque
from typing import Iterable, Optional


class Block:
    __slots__ = ("block_id", "ref_count", "tokens", "size")

    def __init__(self, block_id: int, size: int) -> None:
        self.block_id = block_id
        self.size = size
        self.ref_count = 0
        self.tokens: list[int] = []

    @property
    def full(self) -> bool:
        return len(self.tokens) >= self.size


class BlockPool:
    """Reference-counted KV blocks. ``allocate`` and ``fork`` are undone by ``free``."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free: deque[Block] = deque(Block(i, block_size) for i in range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[Block]:
        if not self._free:
            return None
        block = self._free.popleft()
        block.ref_count = 1
        block.tokens.clear()
        return block

    def fork(self, block: Block) -> Block:
        block.ref_count += 1
        return block

    def free(self, block: Block) -> None:
        if block.ref_count <= 0:
            raise ValueError(f"block {block.block_id} freed twice")
        block.ref_count -= 1
        if block.ref_count == 0:
            self._free.append(block)

    def free_all(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.free(block)

    def allocate_many(self, n: int) -> Optional[list[Block]]:
        """n blocks or none at all."""
        got: list[Block] = []
        for _ in range(n):
            block = self.allocate()  # clean: near miss, the shortfall frees what was gathered
            if block is None:
                self.free_all(got)
                return None
            got.append(block)
        return got

    def copy(self, src: Block) -> Optional[Block]:
        dst = self.allocate()  # clean: returned to the caller
        if dst is not None:
            dst.tokens.extend(src.tokens)
        return dst
