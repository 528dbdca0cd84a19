"""Physical blocks of the cache.  Blocks are counted, since forked sequences share their prefix."""
from __future__ import annotations

from typing import Iterable, Optional

NULL_BLOCK = -1


class BlockAllocator:
    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks))
        self._refs = [0] * num_blocks

    def alloc(self) -> int:
        if not self._free:
            return NULL_BLOCK
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def share(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def free(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)

    def free_all(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.free(block)

    def is_shared(self, block: int) -> bool:
        return self._refs[block] > 1

    @property
    def available(self) -> int:
        return len(self._free)


class BlockTable:
    """Logical to physical map of one sequence."""

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self.blocks: list[int] = []
        self.tokens = 0

    def append_token(self) -> bool:
        if self.tokens == len(self.blocks) * self._block_size:
            block = self._allocator.alloc()  # clean: near miss, in the table until release() or truncate()
            if block == NULL_BLOCK:
                return False
            self.blocks.append(block)
        self.tokens += 1
        return True

    def fork(self) -> "BlockTable":
        child = BlockTable(self._allocator, self._block_size)
        child.blocks = [self._allocator.share(b) for b in self.blocks]  # clean: near miss, owned by the child
        child.tokens = self.tokens
        return child

    def copy_on_write(self) -> Optional[tuple[int, int]]:
        """Make the last block private; returns (from, to) for the copy kernel."""
        if not self.blocks or not self._allocator.is_shared(self.blocks[-1]):
            return None
        fresh = self._allocator.alloc()  # clean: near miss, takes the place of the share that is freed here
        if fresh == NULL_BLOCK:
            return None
        old = self.blocks[-1]
        self.blocks[-1] = fresh
        self._allocator.free(old)
        return old, fresh

    def truncate(self, tokens: int) -> None:
        keep = -(-tokens // self._block_size)
        while len(self.blocks) > keep:
            self._allocator.free(self.blocks.pop())
        self.tokens = min(self.tokens, tokens)

    def release(self) -> None:
        self._allocator.free_all(self.blocks)
        self.blocks = []
        self.tokens = 0


class WindowTable:
    """Sliding window: only the newest blocks are of interest."""

    def __init__(self, allocator: BlockAllocator, window: int) -> None:
        self._allocator = allocator
        self._window = window
        self._blocks: list[int] = []

    def grow(self) -> bool:
        block = self._allocator.alloc()  # leak: the slice below cuts blocks off, not freed
        if block == NULL_BLOCK:
            return False
        self._blocks.append(block)
        self._blocks = self._blocks[-self._window:]
        return True

    def release(self) -> None:
        self._allocator.free_all(self._blocks)
        self._blocks = []
