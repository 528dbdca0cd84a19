"""Prefix cache: full blocks of common system prompts."""
from __future__ import annotations

from typing import Dict, List, Tuple

from .allocator import BlockAllocator


class PrefixCache:
    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self._entries: Dict[Tuple[int, ...], List[int]] = {}

    def insert(self, tokens: List[int], blocks: List[int]) -> None:
        full = len(tokens) // self.allocator.block_size
        key = tuple(tokens[:full * self.allocator.block_size])
        if not key or key in self._entries:
            return
        self.allocator.share(blocks[:full])  # clean: the cache's own reference, freed by evict_all
        self._entries[key] = list(blocks[:full])

    def match(self, tokens: List[int]) -> List[int]:
        """Blocks of the longest cached prefix, with a reference for the caller."""
        best: List[int] = []
        for key, blocks in self._entries.items():
            if len(blocks) > len(best) and tuple(tokens[:len(key)]) == key:
                best = blocks
        self.allocator.share(best)  # clean: the references are the caller's
        return list(best)

    def hit_rate(self, prompts: List[List[int]]) -> float:
        hits = 0
        for p in prompts:
            if self.match(p):  # leak: only the truth of the answer is used, its references are dropped
                hits += 1
        return hits / max(1, len(prompts))

    def evict_all(self) -> None:
        for blocks in self._entries.values():
            self.allocator.free(blocks)
        self._entries.clear()
