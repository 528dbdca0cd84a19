"""Blocks of key/value cache: numbered, counted, shared between requests with the same beginning."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


class KVBlockManager:
    """Gives out block numbers. A block is free again when its last user has let go of it."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.block_size = block_size
        self._free = deque(range(num_blocks))
        self._users = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def alloc_blocks(self, count: int) -> list[int] | None:
        """`count` blocks with one user each, or None if there are not as many."""
        if count > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(count)]
        for block in taken:
            self._users[block] = 1
        return taken

    def free_blocks(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free.append(block)

    def share_blocks(self, blocks: Sequence[int]) -> list[int]:
        """The same blocks for one more user, who frees them like the first."""
        for block in blocks:
            self._users[block] += 1
        return list(blocks)
