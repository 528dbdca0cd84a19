from __future__ import annotations

from typing import Optional

from .block_manager import Block, BlockPool


class PrefixTree:
    """Maps full-block token prefixes to blocks; holds one reference per entry."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._entries: dict[tuple[int, ...], Block] = {}

    def match(self, tokens: list[int]) -> list[Block]:
        """Longest cached prefix. The caller frees the blocks."""
        size = self._pool.block_size
        hit: list[Block] = []
        for end in range(size, len(tokens) + 1, size):
            block = self._entries.get(tuple(tokens[:end]))
            if block is None:
                break
            hit.append(self._pool.fork(block))  # clean: returned in the list
        return hit

    def insert(self, tokens: list[int], table: list[Block]) -> None:
        size = self._pool.block_size
        for i, block in enumerate(table):
            end = (i + 1) * size
            if end > len(tokens):
                break
            key = tuple(tokens[:end])
            held = self._pool.fork(block)  # leak: when the key is already present the count stays up
            if key not in self._entries:
                self._entries[key] = held

    def replace(self, key: tuple[int, ...], block: Block) -> None:
        old = self._entries.get(key)
        self._entries[key] = self._pool.fork(block)  # clean: near miss, the entry it overwrites is freed
        if old is not None:
            self._pool.free(old)

    def hit_length(self, tokens: list[int]) -> int:
        return len(self.match(tokens)) * self._pool.block_size  # leak: forked blocks are only counted

    def evict(self, wanted: int) -> int:
        before = self._pool.num_free
        for key in sorted(self._entries, key=len, reverse=True):
            if self._pool.num_free - before >= wanted:
                break
            self._pool.free(self._entries.pop(key))
        return self._pool.num_free - before

    def peek_tail(self, tokens: list[int]) -> Optional[int]:
        blocks = self.match(tokens)  # clean: freed before either return
        tail = blocks[-1].block_id if blocks else None
        self._pool.free_all(blocks)
        return tail
