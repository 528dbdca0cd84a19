"""Paged KV cache of the rollout engine: block table, prefix sharing, swap."""
from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch


class OutOfBlocks(Exception):
    pass


class BlockAllocator:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free = list(range(num_blocks))
        self._rc = [0] * num_blocks

    @property
    def available(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        if not self._free:
            raise OutOfBlocks
        b = self._free.pop()  # clean: returned with a count of one
        self._rc[b] = 1
        return b

    def fork(self, b: int) -> int:
        self._rc[b] += 1
        return b

    def release(self, b: int) -> None:
        self._rc[b] -= 1
        if self._rc[b] == 0:
            self._free.append(b)

    def refcount(self, b: int) -> int:
        return self._rc[b]


@dataclass
class Sequence:
    sid: int
    tokens: list[int]
    table: list[int] = field(default_factory=list)
    done: bool = False


class PrefixCache:
    """hash -> block; the cache holds one reference for each entry."""

    def __init__(self, alloc: BlockAllocator, limit: int) -> None:
        self.alloc = alloc
        self.limit = limit
        self._lru: OrderedDict[int, int] = OrderedDict()

    def lookup(self, h: int) -> int | None:
        b = self._lru.get(h)
        if b is None:
            return None
        self._lru.move_to_end(h)
        return self.alloc.fork(b)  # clean: the reference goes to the caller

    def publish(self, h: int, b: int) -> None:
        if h in self._lru:
            return
        self._lru[h] = self.alloc.fork(b)  # clean: the cache's own reference, evict() releases it
        while len(self._lru) > self.limit:
            self.evict()

    def evict(self) -> bool:
        if not self._lru:
            return False
        _, b = self._lru.popitem(last=False)
        self.alloc.release(b)
        return True


class BlockManager:
    def __init__(self, alloc: BlockAllocator, cache: PrefixCache) -> None:
        self.alloc = alloc
        self.cache = cache
        self.running: dict[int, Sequence] = {}

    def _chunks(self, tokens: list[int]) -> list[tuple[int, ...]]:
        n = self.alloc.block_size
        return [tuple(tokens[i:i + n]) for i in range(0, len(tokens), n)]

    def blocks_needed(self, seq: Sequence) -> int:
        return len(self._chunks(seq.tokens))

    def admit(self, seq: Sequence) -> bool:
        """Reserve the blocks of a new sequence, sharing cached prefixes."""
        if seq.sid in self.running:
            return False
        if self.blocks_needed(seq) > self.alloc.available:
            return False
        for chunk in self._chunks(seq.tokens):
            b = self.cache.lookup(hash(chunk))  # clean: near miss, joins seq.table, which finish() releases
            if b is None:
                b = self.alloc.allocate()  # clean: near miss, enough blocks were counted first, joins seq.table
            seq.table.append(b)
        self.running[seq.sid] = seq
        return True

    def admit_greedy(self, seq: Sequence) -> bool:
        """Same without the up-front count, for small pools."""
        if seq.sid in self.running:
            return False
        table: list[int] = []
        for chunk in self._chunks(seq.tokens):
            b = self.cache.lookup(hash(chunk))  # leak: shared blocks in the local table are dropped on OutOfBlocks
            if b is None:
                try:
                    b = self.alloc.allocate()  # leak: earlier blocks of the local table are dropped as well
                except OutOfBlocks:
                    return False
            table.append(b)
        seq.table.extend(table)
        self.running[seq.sid] = seq
        return True

    def append_token(self, sid: int, tok: int) -> bool:
        seq = self.running[sid]
        seq.tokens.append(tok)
        if self.blocks_needed(seq) <= len(seq.table):
            return True
        if not self.alloc.available and not self.cache.evict():
            return False
        try:
            seq.table.append(self.alloc.allocate())  # clean: joins the sequence's table
        except OutOfBlocks:
            return False
        return True

    def fork_sequence(self, sid: int, new_sid: int) -> Sequence:
        if new_sid in self.running:
            return self.running[new_sid]
        parent = self.running[sid]
        child = Sequence(new_sid, list(parent.tokens))
        child.table = [self.alloc.fork(b) for b in parent.table]  # leak: a finished parent returns early without the child
        if parent.done:
            return parent
        self.running[new_sid] = child
        return child

    def copy_on_write(self, seq: Sequence, store: torch.Tensor) -> bool:
        """Give seq its own last block if that one is shared."""
        last = seq.table[-1]
        if self.alloc.refcount(last) == 1:
            return True
        try:
            fresh = self.alloc.allocate()  # clean: near miss, replaces the shared block, whose reference is released
        except OutOfBlocks:
            return False
        store[fresh].copy_(store[last])
        seq.table[-1] = fresh
        self.alloc.release(last)
        return True

    def finish(self, sid: int) -> None:
        seq = self.running.pop(sid, None)
        if seq is None:
            return
        for chunk, b in zip(self._chunks(seq.tokens), seq.table):
            if len(chunk) == self.alloc.block_size:
                self.cache.publish(hash(chunk), b)
        while seq.table:
            self.alloc.release(seq.table.pop())


def swap_in(alloc: BlockAllocator, host: dict[int, torch.Tensor], store: torch.Tensor, want: list[int]) -> dict[int, int]:
    """Bring blocks back from host memory; returns old number -> new number."""
    placed: dict[int, int] = {}
    for old in want:
        if not alloc.available:
            break
        new = alloc.allocate()  # leak: a block that is gone from the host continues with the new one allocated
        data = host.pop(old, None)
        if data is None:
            continue
        store[new].copy_(data)
        placed[old] = new
    return placed
