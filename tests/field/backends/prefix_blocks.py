"""Paged KV blocks with reference counts, and the prefix cache above them."""
from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field


class BlockAllocator:
    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.block_size = block_size
        self._free = list(range(num_blocks))
        self._refs = [0] * num_blocks

    @property
    def available(self) -> int:
        return len(self._free)

    def allocate(self) -> int | None:
        if not self._free:
            return None
        block = self._free.pop()  # clean: handed to the caller with one reference
        self._refs[block] = 1
        return block

    def allocate_many(self, count: int) -> list[int] | None:
        taken: list[int] = []
        for _ in range(count):
            if not self._free:
                return None
            block = self._free.pop()  # leak: the blocks taken so far are dropped when the store runs out
            self._refs[block] = 1
            taken.append(block)
        return taken

    def incref(self, block: int) -> int:
        self._refs[block] += 1  # clean: the reference belongs to the caller
        return block

    def decref(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)


@dataclass
class Sequence:
    seq_id: str
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


class PrefixCache:
    def __init__(self, allocator: BlockAllocator, capacity: int) -> None:
        self._alloc = allocator
        self._capacity = capacity
        self._entries: OrderedDict[str, int] = OrderedDict()

    @staticmethod
    def key(tokens: list[int]) -> str:
        return hashlib.sha1(repr(tokens).encode()).hexdigest()

    def match(self, tokens: list[int]) -> list[int]:
        """Blocks of the longest cached prefix; one reference each for the caller."""
        size = self._alloc.block_size
        hits: list[int] = []
        for end in range(size, len(tokens) + 1, size):
            block = self._entries.get(self.key(tokens[:end]))
            if block is None:
                break
            hits.append(self._alloc.incref(block))  # clean: near miss, returned in the list after the break too
        return hits

    def insert(self, key: str, block: int) -> None:
        if key in self._entries:
            self._entries.move_to_end(key)
            return
        while len(self._entries) >= self._capacity:
            _, old = self._entries.popitem(last=False)
            self._alloc.decref(old)
        self._entries[key] = self._alloc.incref(block)  # clean: the table's reference is dropped on eviction

    def refresh(self, key: str, block: int) -> None:
        """Points a known prefix at a recomputed block."""
        self._entries[key] = self._alloc.incref(block)  # leak: the replaced block's table reference is never dropped

    def replace(self, key: str, block: int) -> None:
        old = self._entries.get(key)
        self._entries[key] = self._alloc.incref(block)  # clean: near miss, the old block was read first and is dropped below
        if old is not None:
            self._alloc.decref(old)

    def clear(self) -> None:
        while self._entries:
            _, block = self._entries.popitem()
            self._alloc.decref(block)


class BlockManager:
    def __init__(self, allocator: BlockAllocator, cache: PrefixCache) -> None:
        self._alloc = allocator
        self._cache = cache
        self._running: dict[str, Sequence] = {}

    def admit(self, seq: Sequence) -> bool:
        if seq.seq_id in self._running:
            return True
        needed = -(-len(seq.tokens) // self._alloc.block_size)
        hits = self._cache.match(seq.tokens)  # leak: the matched blocks keep their references when admission is refused
        if needed - len(hits) > self._alloc.available:
            return False
        fresh = self._alloc.allocate_many(needed - len(hits))  # clean: moved into the sequence, None when refused
        if fresh is None:
            for block in hits:
                self._alloc.decref(block)
            return False
        seq.blocks = hits + fresh
        seq.computed = len(hits) * self._alloc.block_size
        self._running[seq.seq_id] = seq
        return True

    def append_token(self, seq: Sequence, token: int) -> bool:
        if len(seq.tokens) % self._alloc.block_size == 0:
            block = self._alloc.allocate()  # clean: owned by the sequence until finish
            if block is None:
                return False
            seq.blocks.append(block)
        seq.tokens.append(token)
        return True

    def fork(self, parent: Sequence, child_id: str) -> Sequence | None:
        if child_id in self._running:
            return None
        shared = [self._alloc.incref(b) for b in parent.blocks]  # clean: owned by the child, which finish drops
        child = Sequence(child_id, list(parent.tokens), shared, parent.computed)
        self._running[child_id] = child
        return child

    def copy_on_write(self, seq: Sequence) -> bool:
        tail = self._alloc.allocate()  # clean: near miss, takes the place of the old tail, which is dropped
        if tail is None:
            return False
        old, seq.blocks[-1] = seq.blocks[-1], tail
        self._alloc.decref(old)
        return True

    def reserve_lookahead(self, seq: Sequence, steps: int) -> int:
        """Tries to hold a spare block for speculative tokens; gives the number usable."""
        spare = self._alloc.allocate()  # leak: when the steps fit the tail the spare is not attached nor freed
        if spare is None:
            return 0
        room = len(seq.blocks) * self._alloc.block_size - len(seq.tokens)
        if steps <= room:
            return steps
        seq.blocks.append(spare)
        return min(steps, room + self._alloc.block_size)

    def finish(self, seq_id: str) -> None:
        seq = self._running.pop(seq_id, None)
        if seq is None:
            return
        size = self._alloc.block_size
        for i, block in enumerate(seq.blocks):
            self._cache.insert(self._cache.key(seq.tokens[: (i + 1) * size]), block)
            self._alloc.decref(block)
        seq.blocks = []
