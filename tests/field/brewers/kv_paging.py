"""Paged KV cache: block ids, shared prefixes, copy on write."""
from __future__ import annotations

import logging
from typing import Dict, Iterable, List, Optional, Tuple

log = logging.getLogger("kv")

BLOCK = 4


class OutOfBlocks(Exception):
    pass


class BlockAllocator:
    """Physical blocks with share counts. alloc gives count one, fork adds one, free takes one."""

    def __init__(self, num_blocks: int) -> None:
        self._free: List[int] = list(range(num_blocks - 1, -1, -1))
        self._share = [0] * num_blocks

    def alloc(self) -> Optional[int]:
        if not self._free:
            return None
        block = self._free.pop()
        self._share[block] = 1
        return block

    def alloc_or_raise(self) -> int:
        block = self.alloc()  # clean: returned, None raises
        if block is None:
            raise OutOfBlocks()
        return block

    def fork(self, block: int) -> int:
        self._share[block] += 1
        return block

    def free(self, block: int) -> None:
        self._share[block] -= 1
        if self._share[block] == 0:
            self._free.append(block)

    def shared(self, block: int) -> bool:
        return self._share[block] > 1

    def num_free(self) -> int:
        return len(self._free)

    def alloc_many(self, n: int) -> Optional[List[int]]:
        blocks: List[int] = []
        while len(blocks) < n:
            block = self.alloc()  # clean: near miss, a shortage frees the blocks got so far
            if block is None:
                self.free_many(blocks)
                return None
            blocks.append(block)
        return blocks

    def free_many(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.free(block)


class Sequence_:
    def __init__(self, seq_id: int, tokens: List[int]) -> None:
        self.seq_id = seq_id
        self.tokens = tokens
        self.blocks: List[int] = []

    @property
    def need(self) -> int:
        return (len(self.tokens) + BLOCK - 1) // BLOCK


class CacheManager:
    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self.tables: Dict[int, Sequence_] = {}
        self.prefix: Dict[Tuple[int, ...], int] = {}
        self.swapped: Dict[int, List[int]] = {}

    def admit(self, seq: Sequence_) -> bool:
        if seq.seq_id in self.tables:
            return False
        blocks = self.allocator.alloc_many(seq.need)  # clean: moved into the sequence, finish frees them
        if blocks is None:
            return False
        seq.blocks.extend(blocks)
        self.tables[seq.seq_id] = seq
        return True

    def finish(self, seq_id: int) -> None:
        seq = self.tables.pop(seq_id)
        self.allocator.free_many(seq.blocks)
        seq.blocks.clear()

    def append(self, seq_id: int, token: int) -> bool:
        seq = self.tables[seq_id]
        if len(seq.tokens) % BLOCK == 0:
            block = self.allocator.alloc()  # clean: None-checked, appended to the sequence's blocks
            if block is None:
                return False
            seq.blocks.append(block)
        seq.tokens.append(token)
        return True

    def branch(self, seq_id: int, new_id: int) -> Optional[Sequence_]:
        parent = self.tables[seq_id]
        child = Sequence_(new_id, list(parent.tokens))
        for block in parent.blocks:
            child.blocks.append(self.allocator.fork(block))  # leak: new_id is taken, None returned and the forks are forgotten
        if new_id in self.tables:
            log.warning("sequence %d exists", new_id)
            return None
        self.tables[new_id] = child
        return child

    def make_writable(self, seq: Sequence_, index: int) -> bool:
        old = seq.blocks[index]
        if not self.allocator.shared(old):
            return True
        fresh = self.allocator.alloc()  # clean: near miss, takes the old block's place after that was freed
        if fresh is None:
            return False
        self.allocator.free(old)
        seq.blocks[index] = fresh
        return True

    def defragment(self, seq: Sequence_) -> int:
        moved = 0
        for i, old in enumerate(seq.blocks):
            fresh = self.allocator.alloc()  # leak: a block that lies no lower is skipped with continue
            if fresh is None:
                break
            if fresh >= old:
                continue
            seq.blocks[i] = fresh
            self.allocator.free(old)
            moved += 1
        return moved

    def remember_prefix(self, seq: Sequence_) -> None:
        key = tuple(seq.tokens[:BLOCK])
        if len(key) == BLOCK and key not in self.prefix:
            self.prefix[key] = self.allocator.fork(seq.blocks[0])  # clean: near miss, the prefix table owns it, evict_prefixes frees

    def evict_prefixes(self) -> None:
        for block in self.prefix.values():
            self.allocator.free(block)
        self.prefix.clear()

    def admit_with_prefix(self, seq: Sequence_) -> bool:
        if seq.seq_id in self.tables:
            return False
        hit = self.prefix.get(tuple(seq.tokens[:BLOCK]))
        if hit is None:
            return self.admit(seq)
        head = self.allocator.fork(hit)  # leak: the tail allocation fails, False returned with the prefix still counted
        tail = self.allocator.alloc_many(seq.need - 1)  # clean: moved into the sequence
        if tail is None:
            return False
        seq.blocks = [head, *tail]
        self.tables[seq.seq_id] = seq
        return True

    def swap_out(self, seq_id: int, host: "BlockAllocator") -> bool:
        if seq_id in self.swapped:
            return False
        seq = self.tables[seq_id]
        slots = host.alloc_many(len(seq.blocks))  # clean: near miss, stored in swapped, swap_in frees them
        if slots is None:
            return False
        self.swapped[seq_id] = slots
        self.allocator.free_many(seq.blocks)
        seq.blocks = []
        del self.tables[seq_id]
        return True

    def swap_in(self, seq: Sequence_, host: "BlockAllocator") -> bool:
        slots = self.swapped.get(seq.seq_id)
        if slots is None or seq.seq_id in self.tables:
            return False
        blocks = self.allocator.alloc_many(len(slots))  # clean: moved into the sequence
        if blocks is None:
            return False
        seq.blocks = blocks
        self.tables[seq.seq_id] = seq
        host.free_many(self.swapped.pop(seq.seq_id))
        return True

    def beam(self, seq: Sequence_, width: int) -> List[int]:
        tails: List[int] = []
        try:
            for _ in range(width):
                tails.append(self.allocator.alloc_or_raise())  # leak: OutOfBlocks is caught, [] returned with the tails so far
        except OutOfBlocks:
            return []
        return tails

    def beam_step(self, seq: Sequence_, width: int) -> int:
        tails = self.beam(seq, width)  # clean: all freed, the best one is appended instead
        if not tails:
            return 0
        best, rest = tails[0], tails[1:]
        self.allocator.free_many(rest)
        seq.blocks.append(best)
        return len(rest)

    def draft(self, seq: Sequence_, k: int, accepted: int) -> int:
        temp = self.allocator.alloc_many(k)  # leak: only the rejected tail is freed, the accepted blocks are kept nowhere
        if temp is None:
            return 0
        self.allocator.free_many(temp[accepted:])
        seq.tokens.extend([0] * (accepted * BLOCK))
        return accepted

    def draft_kept(self, seq: Sequence_, k: int, accepted: int) -> int:
        temp = self.allocator.alloc_many(k)  # clean: near miss, accepted blocks move to the sequence, the others are freed
        if temp is None:
            return 0
        seq.blocks += temp[:accepted]
        self.allocator.free_many(temp[accepted:])
        return accepted

    def trim(self, seq: Sequence_) -> None:
        while len(seq.blocks) > seq.need:
            self.allocator.free(seq.blocks.pop())


def can_fit(allocator: BlockAllocator, need: int) -> bool:
    return allocator.alloc_many(need) is not None  # leak: the blocks serve as a question and are dropped


def main() -> None:
    dev, host = BlockAllocator(16), BlockAllocator(16)
    mgr = CacheManager(dev)
    a = Sequence_(1, [1, 2, 3, 4, 5])
    print(mgr.admit(a), mgr.append(1, 6))
    mgr.remember_prefix(a)
    b = Sequence_(2, [1, 2, 3, 4, 9])
    print(mgr.admit_with_prefix(b), mgr.make_writable(b, 0), mgr.swap_out(1, host), mgr.swap_in(a, host))
    child = mgr.branch(1, 3)
    print(child.blocks if child else None, mgr.beam_step(b, 3), mgr.draft_kept(b, 4, 2))
    for sid in (1, 2, 3):
        mgr.finish(sid)
    mgr.evict_prefixes()
    print(dev.num_free(), host.num_free())


if __name__ == "__main__":
    main()
