"""Prefix cache with reference counted blocks."""
from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple


@dataclass
class CacheBlock:
    block_id: int
    digest: Optional[str] = None
    refs: int = 0


class PrefixCache:
    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free: List[CacheBlock] = [CacheBlock(i) for i in range(blocks)]
        self._by_digest: Dict[str, CacheBlock] = {}
        self._evictable: "OrderedDict[int, CacheBlock]" = OrderedDict()

    def inc_ref(self, block: CacheBlock) -> None:
        if block.refs == 0:
            self._evictable.pop(block.block_id, None)
        block.refs += 1

    def dec_ref(self, block: CacheBlock) -> None:
        block.refs -= 1
        if block.refs == 0:
            if block.digest is None:
                self._free.append(block)
            else:
                self._evictable[block.block_id] = block

    def lookup(self, digest: str) -> Optional[CacheBlock]:
        return self._by_digest.get(digest)

    def new_block(self) -> Optional[CacheBlock]:
        """A block with one reference, to be given up with dec_ref."""
        if self._free:
            block = self._free.pop()  # clean: returned with one reference
        elif self._evictable:
            _, block = self._evictable.popitem(last=False)  # clean: the victim is reused as the new block
            self._by_digest.pop(block.digest or "", None)
            block.digest = None
        else:
            return None
        block.refs = 1
        return block

    def publish(self, block: CacheBlock, digest: str) -> None:
        block.digest = digest
        self._by_digest[digest] = block

    def shrink(self, keep: int) -> int:
        dropped = 0
        while len(self._evictable) > keep:
            _, victim = self._evictable.popitem(last=False)  # clean: near miss, goes to the free list
            self._by_digest.pop(victim.digest or "", None)
            victim.digest = None
            self._free.append(victim)
            dropped += 1
        return dropped

    def evict_cold(self, pinned: Sequence[int]) -> int:
        n = 0
        while self._evictable:
            bid, victim = self._evictable.popitem(last=False)  # leak: a pinned block is in neither store after the break
            if bid in pinned:
                break
            self._by_digest.pop(victim.digest or "", None)
            victim.digest = None
            self._free.append(victim)
            n += 1
        return n


def digest_of(parent: str, tokens: Tuple[int, ...]) -> str:
    return hashlib.sha256((parent + repr(tokens)).encode()).hexdigest()


class PrefixMatcher:
    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.held: Dict[str, List[CacheBlock]] = {}

    def match(self, req_id: str, tokens: Sequence[int]) -> int:
        bs = self.cache.block_size
        parent, got = "", []
        for i in range(0, len(tokens) - bs + 1, bs):
            parent = digest_of(parent, tuple(tokens[i:i + bs]))
            block = self.cache.lookup(parent)
            if block is None:
                break
            self.cache.inc_ref(block)  # clean: near miss, the break keeps those before it, release drops them
            got.append(block)
        self.held.setdefault(req_id, []).extend(got)
        return len(got) * bs

    def match_exact(self, req_id: str, digests: Sequence[str]) -> bool:
        got = []
        for d in digests:
            block = self.cache.lookup(d)
            if block is None:
                return False
            self.cache.inc_ref(block)  # leak: a later miss returns with the references still counted
            got.append(block)
        self.held.setdefault(req_id, []).extend(got)
        return True

    def extend(self, req_id: str) -> bool:
        block = self.cache.new_block()  # leak: an unknown request makes it return without the block stored
        if block is None:
            return False
        if req_id not in self.held:
            return False
        self.held[req_id].append(block)
        return True

    def extend_many(self, req_id: str, n: int) -> bool:
        fresh: List[CacheBlock] = []
        for _ in range(n):
            block = self.cache.new_block()  # clean: near miss, on shortage all fresh ones lose their reference
            if block is None:
                for b in fresh:
                    self.cache.dec_ref(b)
                return False
            fresh.append(block)
        self.held.setdefault(req_id, []).extend(fresh)
        return True

    def peek_tokens(self, digest: str) -> int:
        block = self.cache.lookup(digest)
        if block is None:
            return 0
        self.cache.inc_ref(block)  # clean: dropped at once below
        count = block.refs - 1
        self.cache.dec_ref(block)
        return count

    def release(self, req_id: str) -> None:
        for block in reversed(self.held.pop(req_id, [])):
            self.cache.dec_ref(block)
