"""Physical K/V blocks with reference counts, and the prefix cache over them."""
from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence

BLOCK_TOKENS = 16


@dataclass
class Block:
    index: int
    refs: int = 0
    digest: Optional[str] = None


class BlockAllocator:
    def __init__(self, num_blocks: int):
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._free: List[Block] = list(self._blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[Block]:
        if not self._free:
            return None
        block = self._free.pop()
        block.refs = 1
        block.digest = None
        return block

    def incref(self, block: Block) -> Block:
        block.refs += 1
        return block

    def decref(self, block: Block) -> None:
        block.refs -= 1
        if block.refs == 0:
            self._free.append(block)

    def allocate_many(self, n: int) -> Optional[List[Block]]:
        """n blocks or None; never a part of them."""
        if n > len(self._free):
            return None
        out: List[Block] = []
        for _ in range(n):
            out.append(self.allocate())  # clean: returned in the list
        return out


def digest_of(tokens: Sequence[int], parent: str = "") -> str:
    return hashlib.sha1((parent + ",".join(map(str, tokens))).encode()).hexdigest()


class PrefixCache:
    """Holds one reference to every cached block; LRU."""

    def __init__(self, allocator: BlockAllocator, capacity: int):
        self.allocator = allocator
        self.capacity = capacity
        self._by_digest: "OrderedDict[str, Block]" = OrderedDict()
        self._hot: Dict[str, Block] = {}

    def insert(self, digest: str, block: Block) -> None:
        if digest in self._by_digest:
            self._by_digest.move_to_end(digest)
            return
        block.digest = digest
        self._by_digest[digest] = self.allocator.incref(block)  # clean: evict or clear drops it
        while len(self._by_digest) > self.capacity:
            self.evict()

    def replace(self, digest: str, block: Block) -> None:
        """A better copy (for instance re-quantised) of the same prefix."""
        old = self._by_digest.get(digest)
        self._by_digest[digest] = self.allocator.incref(block)  # clean: near miss, the old one is dropped
        if old is not None:
            self.allocator.decref(old)

    def pin(self, digest: str) -> bool:
        """Keeps a system prompt from being evicted."""
        block = self._by_digest.get(digest)
        if block is None:
            return False
        self._hot[digest] = self.allocator.incref(block)  # leak: unpin pops the entry without a decref
        return True

    def unpin(self, digest: str) -> None:
        self._hot.pop(digest, None)

    def lookup(self, digest: str) -> Optional[Block]:
        """A new reference for the caller."""
        block = self._by_digest.get(digest)
        if block is None:
            return None
        self._by_digest.move_to_end(digest)
        return self.allocator.incref(block)  # clean: handed to the caller

    def match(self, tokens: Sequence[int]) -> List[Block]:
        """Longest cached prefix; the caller owns the references."""
        out: List[Block] = []
        parent = ""
        for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            parent = digest_of(tokens[start:start + BLOCK_TOKENS], parent)
            block = self.lookup(parent)  # clean: returned in the list
            if block is None:
                break
            out.append(block)
        return out

    def match_length(self, tokens: Sequence[int]) -> int:
        """For the router: how many tokens would be served from here."""
        blocks = self.match(tokens)  # leak: only their number is used
        return len(blocks) * BLOCK_TOKENS

    def evict(self) -> bool:
        if not self._by_digest:
            return False
        _, block = self._by_digest.popitem(last=False)
        self.allocator.decref(block)
        return True

    def clear(self) -> None:
        while self.evict():
            pass
