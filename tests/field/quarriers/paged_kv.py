"""Paged KV cache: block allocator with sharing, prefix cache and block tables."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional


class BlockAllocator:
    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.block_size = block_size
        self._free = list(range(num_blocks))
        self._refs = [0] * num_blocks

    def alloc(self) -> Optional[int]:
        if not self._free:
            return None
        b = self._free.pop()
        self._refs[b] = 1
        return b

    def incref(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def free(self, block: int) -> None:
        """Drop one reference."""
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)

    def shared(self, block: int) -> bool:
        return self._refs[block] > 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc_many(self, n: int) -> Optional[list[int]]:
        got: list[int] = []
        for _ in range(n):
            b = self.alloc()  # clean: near miss, rolled back below when short
            if b is None:
                for x in got:
                    self.free(x)
                return None
            got.append(b)
        return got


@dataclass
class Sequence:
    seq_id: int
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)


class PrefixCache:
    """Keeps one reference on each block it has published."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self._table: dict[int, int] = {}

    def lookup(self, key: int) -> Optional[int]:
        block = self._table.get(key)
        if block is None:
            return None
        return self.allocator.incref(block)  # clean: the reference is the caller's

    def publish(self, key: int, block: int) -> None:
        self.allocator.incref(block)  # leak: an older entry under the same key is overwritten with its reference
        self._table[key] = block

    def evict(self, key: int) -> None:
        block = self._table.pop(key, None)
        if block is not None:
            self.allocator.free(block)

    def hit_length(self, keys: list[int]) -> int:
        n = 0
        for key in keys:
            block = self.lookup(key)  # leak: counted and never freed
            if block is None:
                break
            n += 1
        return n * self.allocator.block_size


class BlockTables:
    def __init__(self, allocator: BlockAllocator, cache: PrefixCache) -> None:
        self.allocator = allocator
        self.cache = cache
        self._seqs: dict[int, Sequence] = {}

    def admit(self, seq: Sequence, keys: list[int]) -> bool:
        cached: list[int] = []
        for key in keys:
            b = self.cache.lookup(key)  # leak: not rolled back when the fresh blocks are short
            if b is None:
                break
            cached.append(b)
        need = -(-len(seq.tokens) // self.allocator.block_size) - len(cached)
        fresh = self.allocator.alloc_many(max(need, 0))  # clean: stored in seq.blocks, release frees it
        if fresh is None:
            return False
        seq.blocks = cached + fresh
        self._seqs[seq.seq_id] = seq
        return True

    def readmit(self, seq: Sequence, keys: list[int]) -> bool:
        self._drop_blocks(seq)
        for key in keys:
            b = self.cache.lookup(key)  # clean: in seq.blocks, freed by _drop_blocks or release
            if b is None:
                break
            seq.blocks.append(b)
        need = -(-len(seq.tokens) // self.allocator.block_size) - len(seq.blocks)
        fresh = self.allocator.alloc_many(max(need, 0))  # clean: near miss, None is nothing to free
        if fresh is None:
            self._drop_blocks(seq)
            return False
        seq.blocks.extend(fresh)
        self._seqs[seq.seq_id] = seq
        return True

    def append_token(self, seq: Sequence, token: int) -> bool:
        if len(seq.tokens) % self.allocator.block_size == 0:
            block = self.allocator.alloc()  # clean: appended to the table
            if block is None:
                return False
            seq.blocks.append(block)
        elif self.allocator.shared(seq.blocks[-1]):
            fresh = self.allocator.alloc()  # clean: replaces the shared block, whose reference is dropped
            if fresh is None:
                return False
            old = seq.blocks[-1]
            seq.blocks[-1] = fresh
            self.allocator.free(old)
        seq.tokens.append(token)
        return True

    def fork(self, parent: Sequence, child_id: int) -> Optional[Sequence]:
        child = Sequence(child_id, list(parent.tokens))
        for b in parent.blocks[:-1]:
            child.blocks.append(self.allocator.incref(b))  # leak: child is dropped when no tail block is left
        tail = self.allocator.alloc()  # clean: goes into child.blocks
        if tail is None:
            return None
        child.blocks.append(tail)
        self._seqs[child_id] = child
        return child

    def share(self, parent: Sequence, child_id: int) -> Sequence:
        child = Sequence(child_id, list(parent.tokens))
        child.blocks = [self.allocator.incref(b) for b in parent.blocks]  # clean: released with the child
        self._seqs[child_id] = child
        return child

    def compact(self, seq: Sequence, keep: int) -> None:
        """Move the last keep blocks to fresh ones (defragmentation)."""
        moved = self.allocator.alloc_many(keep)  # clean: installed, or None
        if moved is None:
            return
        old = seq.blocks
        seq.blocks = moved
        for b in old:
            self.allocator.free(b)

    def _drop_blocks(self, seq: Sequence) -> None:
        while seq.blocks:
            self.allocator.free(seq.blocks.pop())

    def release(self, seq_id: int) -> None:
        seq = self._seqs.pop(seq_id, None)
        if seq is not None:
            self._drop_blocks(seq)


def reserve_lookahead(allocator: BlockAllocator, seq: Sequence, n: int, watermark: int) -> int:
    """Pre-extend a sequence for multi-step scheduling. Returns the number of blocks added."""
    extra = allocator.alloc_many(n)  # leak: below the watermark they are neither stored nor freed
    if not extra:
        return 0
    if allocator.num_free < watermark:
        return 0
    seq.blocks.extend(extra)
    return len(extra)


if __name__ == "__main__":
    a = BlockAllocator(32, 4)
    tables = BlockTables(a, PrefixCache(a))
    s = Sequence(1, list(range(9)))
    assert tables.admit(s, []) and len(s.blocks) == 3
    tables.append_token(s, 1)
    c = tables.share(s, 2)
    tables.release(1)
    tables.release(2)
    assert a.num_free == 32, a.num_free
