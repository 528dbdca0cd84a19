"""Prefix cache with reference counted blocks."""
from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Sequence


@dataclass
class CachedBlock:
    block_id: int
    key: bytes | None = None
    refs: int = 0

    def inc_ref(self) -> None:
        self.refs += 1

    def dec_ref(self) -> int:
        self.refs -= 1
        return self.refs


class PrefixCache:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [CachedBlock(i) for i in range(num_blocks)]
        self.free_ids: list[int] = list(range(num_blocks))
        self.index: dict[bytes, CachedBlock] = {}

    @staticmethod
    def chain(prev: bytes, tokens: Sequence[int]) -> bytes:
        h = hashlib.blake2b(prev, digest_size=16)
        h.update(str(tuple(tokens)).encode())
        return h.digest()

    def lookup(self, key: bytes) -> CachedBlock | None:
        return self.index.get(key)

    def new_block(self, key: bytes) -> CachedBlock | None:
        if not self.free_ids:
            return None
        block = self.blocks[self.free_ids.pop()]
        block.key = key
        block.refs = 1
        self.index[key] = block
        return block

    def drop(self, block: CachedBlock) -> None:
        if block.dec_ref() == 0:
            if block.key is not None:
                self.index.pop(block.key, None)
                block.key = None
            self.free_ids.append(block.block_id)

    def reclaim_one(self, keep: bytes) -> int | None:
        """Takes an id from the free list for a swap-in."""
        if not self.free_ids:
            return None
        bid = self.free_ids.pop()  # leak: when the block still carries the key it is neither returned nor put back
        if self.blocks[bid].key == keep:
            return None
        return bid

    def reclaim_other(self, keep: bytes) -> int | None:
        if not self.free_ids:
            return None
        bid = self.free_ids.pop()  # clean: near miss, goes back to the list when it is not suitable
        if self.blocks[bid].key == keep:
            self.free_ids.append(bid)
            return None
        return bid


class CacheSession:
    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.held: list[CachedBlock] = []

    def match(self, tokens: list[int]) -> int:
        """Pins the longest cached prefix, returns its length."""
        key, n, bs = b"", 0, self.cache.block_size
        while n + bs <= len(tokens):
            key = self.cache.chain(key, tokens[n:n + bs])
            block = self.cache.lookup(key)
            if block is None:
                break
            block.inc_ref()  # clean: collected in held, which release() drops
            self.held.append(block)
            n += bs
        return n

    def match_at_least(self, tokens: list[int], minimum: int) -> list[CachedBlock]:
        key, bs = b"", self.cache.block_size
        matched: list[CachedBlock] = []
        for n in range(0, len(tokens) - bs + 1, bs):
            key = self.cache.chain(key, tokens[n:n + bs])
            block = self.cache.lookup(key)
            if block is None:
                break
            block.inc_ref()  # leak: a prefix that is too short is dropped with its references
            matched.append(block)
        if len(matched) * bs < minimum:
            return []
        self.held.extend(matched)
        return matched

    def is_hot(self, key: bytes, threshold: int = 4) -> bool:
        block = self.cache.lookup(key)
        if block is None:
            return False
        block.inc_ref()  # clean: near miss, the count is given back on both outcomes
        hot = block.refs - 1 >= threshold
        self.cache.drop(block)
        return hot

    def copy_block(self, key: bytes, new_key: bytes) -> CachedBlock | None:
        src = self.cache.lookup(key)
        if src is None:
            return None
        src.inc_ref()  # leak: without a free block the early return keeps the source referenced
        dst = self.cache.new_block(new_key)  # clean: put into held
        if dst is None:
            return None
        self.held.append(dst)
        self.cache.drop(src)
        return dst

    def extend(self, key: bytes, tokens: list[int]) -> bool:
        new = self.cache.new_block(self.cache.chain(key, tokens))  # clean: None is checked, otherwise held
        if new is None:
            return False
        self.held.append(new)
        return True

    def prime(self, prompts: list[list[int]]) -> int:
        made = 0
        for prompt in prompts:
            key = self.cache.chain(b"", prompt[: self.cache.block_size])
            if self.cache.lookup(key) is not None:
                continue
            if self.cache.new_block(key):  # leak: truth-tested and forgotten, its first reference is never dropped
                made += 1
        return made

    def truncate(self, keep: int) -> None:
        tail = self.held[keep:]
        del self.held[keep:]
        for block in tail:
            self.cache.drop(block)

    def release(self) -> None:
        while self.held:
            self.cache.drop(self.held.pop())
