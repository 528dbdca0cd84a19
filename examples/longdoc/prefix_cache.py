"""Blocks of finished prompts, kept for the next document that begins alike."""

from __future__ import annotations

from collections import OrderedDict

from .kv_blocks import KVBlockManager


class PrefixCache:
    """Least recently used prefixes go first."""

    def __init__(self, manager: KVBlockManager, capacity: int = 64) -> None:
        self._manager = manager
        self._capacity = capacity
        self._entries: OrderedDict[int, list[int]] = OrderedDict()

    def cached_tokens(self, prefix: int) -> int:
        """How much of a document need not be computed again; asking counts as use."""
        blocks = self._entries.get(prefix)
        if blocks is None:
            return 0
        self._entries.move_to_end(prefix)
        return len(blocks) * self._manager.block_size

    def reserve(self, prefix: int, num_tokens: int) -> bool:
        """Room for a prefix that is not cached yet."""
        if prefix in self._entries:
            return True
        while len(self._entries) >= self._capacity:
            self.evict()
        blocks = self._manager.alloc_blocks(self._manager.blocks_for(num_tokens))
        if blocks is None:
            return False
        self._entries[prefix] = blocks
        return True

    def evict(self) -> None:
        """Forget the prefix that was not used for the longest time."""
        _, blocks = self._entries.popitem(last=False)
        self._manager.free_blocks(blocks)

    def close(self) -> None:
        """Free whatever is cached."""
        while self._entries:
            self.evict()

    def reset(self) -> None:
        """Forget every prefix, for instance when the model's weights were exchanged."""
        self._entries.clear()
