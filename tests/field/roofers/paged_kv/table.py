from __future__ import annotations

from typing import Sequence

from .allocator import Block, BlockAllocator


class BlockTable:
    """Logical to physical blocks of one sequence; owns one count of each."""

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.blocks: list[Block] = []
        self.length = 0

    def adopt(self, blocks: Sequence[Block]) -> None:
        """Takes over the caller's counts."""
        self.blocks.extend(blocks)
        self.length += len(blocks) * self.block_size

    def append_tokens(self, n: int) -> bool:
        need = -(-(self.length + n) // self.block_size) - len(self.blocks)
        got: list[Block] = []
        for _ in range(need):
            b = self.allocator.alloc()  # clean: near miss, given back when the rest cannot be had, else owned by the table
            if b is None:
                while got:
                    self.allocator.decref(got.pop())
                return False
            got.append(b)
        self.blocks += got
        self.length += n
        return True

    def fork(self) -> "BlockTable":
        child = BlockTable(self.allocator, self.block_size)
        for b in self.blocks:
            self.allocator.incref(b)  # clean: the child's table owns the count
            child.blocks.append(b)
        child.length = self.length
        return child

    def make_last_writable(self) -> bool:
        if not self.blocks:
            return True
        fresh = self.allocator.cow(self.blocks[-1])  # clean: near miss, cow gave back the count that is overwritten
        if fresh is None:
            return False
        self.blocks[-1] = fresh
        return True

    def truncate(self, length: int) -> None:
        keep = -(-length // self.block_size)
        while len(self.blocks) > keep:
            self.allocator.decref(self.blocks.pop())
        self.length = min(self.length, length)

    def release(self) -> None:
        self.truncate(0)
