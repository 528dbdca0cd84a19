"""Paged KV cache: block manager, sequence tables and the copy-on-write helper."""
from __future__ import annotations

from collections import deque


class OutOfBlocks(Exception):
    pass


class KVBlock:
    __slots__ = ("index", "ref", "filled")

    def __init__(self, index):
        self.index = index
        self.ref = 0
        self.filled = 0


class BlockAllocator:
    def __init__(self, num_blocks):
        self._free = deque(KVBlock(i) for i in range(num_blocks))

    def allocate(self):
        if not self._free:
            raise OutOfBlocks()
        block = self._free.popleft()  # clean: returned to the caller with one reference
        block.ref = 1
        return block

    def try_allocate(self):
        if not self._free:
            return None
        block = self._free.popleft()  # clean: returned to the caller
        block.ref = 1
        return block

    def free(self, block):
        block.ref -= 1
        if block.ref == 0:
            block.filled = 0
            self._free.append(block)

    def fork(self, block):
        block.ref += 1  # clean: the caller owns the added reference
        return block

    @property
    def num_free(self):
        return len(self._free)


class SequenceTable:
    """Block table of the running sequences."""

    def __init__(self, allocator, block_size):
        self.allocator = allocator
        self.block_size = block_size
        self.tables = {}
        self.swapped = {}

    def admit(self, seq_id, n_tokens):
        need = -(-n_tokens // self.block_size)
        if self.allocator.num_free < need:
            return False
        if seq_id in self.tables:
            return True
        blocks = []
        for _ in range(need):
            blocks.append(self.allocator.allocate())  # clean: stored in the table, finish() frees it
        self.tables[seq_id] = blocks
        return True

    def admit_best_effort(self, seq_id, need):
        blocks = []
        while len(blocks) < need:
            block = self.allocator.try_allocate()  # leak: the blocks gathered so far are dropped when one is refused
            if block is None:
                return False
            blocks.append(block)
        self.tables.setdefault(seq_id, []).extend(blocks)
        return True

    def admit_or_rollback(self, seq_id, need):
        blocks = []
        while len(blocks) < need:
            block = self.allocator.try_allocate()  # clean: near miss, the refusal frees what was gathered
            if block is None:
                for b in blocks:
                    self.allocator.free(b)
                return False
            blocks.append(block)
        self.tables.setdefault(seq_id, []).extend(blocks)
        return True

    def append_token(self, seq_id):
        table = self.tables[seq_id]
        last = table[-1]
        if last.filled < self.block_size and last.ref == 1:
            last.filled += 1
            return last
        if last.ref > 1:
            fresh = self.allocator.allocate()  # clean: takes the shared block's place in the table
            fresh.filled = last.filled + 1
            table[-1] = fresh
            self.allocator.free(last)
            return fresh
        fresh = self.allocator.allocate()  # clean: appended to the table
        fresh.filled = 1
        table.append(fresh)
        return fresh

    def fork(self, parent, child):
        shared = []
        for block in self.tables[parent]:
            shared.append(self.allocator.fork(block))  # clean: near miss, the child's table owns the references and finish() drops them
        old = self.tables.pop(child, None)
        if old:
            for block in old:
                self.allocator.free(block)
        self.tables[child] = shared

    def reserve_lookahead(self, seq_id, k):
        table = self.tables.get(seq_id)
        extra = [self.allocator.allocate() for _ in range(k)]  # leak: dropped when the sequence has already gone
        if table is None:
            return 0
        table.extend(extra)
        return len(extra)

    def swap_out(self, seq_id, host):
        blocks = self.tables.pop(seq_id)
        slots = []
        for block in blocks:
            slot = host.allocate()  # clean: kept in self.swapped until swap_in or abort frees it
            slot.filled = block.filled
            slots.append(slot)
            self.allocator.free(block)
        self.swapped.setdefault(seq_id, []).extend(slots)

    def swap_in(self, seq_id, host):
        slots = self.swapped.pop(seq_id)
        blocks = []
        for slot in slots:
            block = self.allocator.allocate()  # clean: goes into the table
            block.filled = slot.filled
            blocks.append(block)
            host.free(slot)
        self.tables.setdefault(seq_id, []).extend(blocks)

    def finish(self, seq_id):
        for block in self.tables.pop(seq_id, ()):
            self.allocator.free(block)

    def abort(self, seq_id, host):
        self.finish(seq_id)
        for slot in self.swapped.pop(seq_id, ()):
            host.free(slot)


class CopyOnWrite:
    def __init__(self, allocator):
        self.allocator = allocator
        self.pending = []

    def split(self, block, dirty):
        twin = self.allocator.allocate()  # leak: the early return for a clean block forgets it
        if not dirty:
            return block
        twin.filled = block.filled
        self.pending.append((block, twin))
        return twin

    def flush(self):
        moves = [(a.index, b.index) for a, b in self.pending]
        for src, _ in self.pending:
            self.allocator.free(src)
        self.pending.clear()
        return moves


def warm_first_block(allocator):
    block = allocator.allocate()  # leak: falls off the end with the block held
    block.filled = 0
    print("warm block", block.index)
