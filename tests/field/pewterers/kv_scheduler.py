"""Paged KV cache: block allocator and a continuous-batching scheduler."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional

BLOCK_SIZE = 16


class BlockAllocator:
    def __init__(self, num_blocks: int) -> None:
        self._free: Deque[int] = deque(range(num_blocks))
        self._refs = [0] * num_blocks

    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[int]:
        if not self._free:
            return None
        block = self._free.popleft()
        self._refs[block] = 1
        return block

    def allocate_many(self, n: int) -> Optional[List[int]]:
        blocks: List[int] = []
        for _ in range(n):
            block = self.allocate()  # leak: blocks taken before exhaustion are dropped with the list
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def fork(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def free(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)


@dataclass
class Sequence:
    seq_id: int
    prompt_len: int
    max_tokens: int = 32
    generated: int = 0
    blocks: List[int] = field(default_factory=list)
    cancelled: bool = False

    @property
    def length(self) -> int:
        return self.prompt_len + self.generated

    def blocks_needed(self) -> int:
        return -(-self.length // BLOCK_SIZE)


class Scheduler:
    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self.waiting: Deque[Sequence] = deque()
        self.running: List[Sequence] = []
        self._pinned_prefix: Dict[str, List[int]] = {}

    def submit(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def _release(self, seq: Sequence) -> None:
        for block in seq.blocks:
            self.allocator.free(block)
        seq.blocks = []

    def admit(self) -> int:
        admitted = 0
        while self.waiting:
            seq = self.waiting[0]
            if self.allocator.num_free() < seq.blocks_needed():
                break
            blocks = self.allocator.allocate_many(seq.blocks_needed())  # clean: moved into the sequence, _release frees
            if blocks is None:
                break
            self.waiting.popleft()
            seq.blocks = blocks
            self.running.append(seq)
            admitted += 1
        return admitted

    def admit_urgent(self, seq: Sequence) -> bool:
        blocks = self.allocator.allocate_many(seq.blocks_needed())  # leak: a cancelled sequence returns before the blocks are stored
        if blocks is None:
            return False
        if seq.cancelled:
            return False
        seq.blocks = blocks
        self.running.insert(0, seq)
        return True

    def step(self) -> List[Sequence]:
        finished: List[Sequence] = []
        for seq in list(self.running):
            if seq.cancelled:
                self._finish(seq)
                continue
            seq.generated += 1
            if seq.blocks_needed() > len(seq.blocks) and not self._grow(seq):
                self._preempt(seq)
                continue
            if seq.generated >= seq.max_tokens:
                self._finish(seq)
                finished.append(seq)
        return finished

    def _grow(self, seq: Sequence) -> bool:
        block = self.allocator.allocate()  # clean: appended to the sequence's blocks
        if block is None:
            return False
        seq.blocks.append(block)
        return True

    def _finish(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._release(seq)

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._release(seq)
        seq.generated = 0
        self.waiting.appendleft(seq)

    def fork(self, parent: Sequence, child_id: int) -> Optional[Sequence]:
        """Share full blocks, copy the last partial one."""
        child = Sequence(child_id, parent.prompt_len, parent.max_tokens, parent.generated)
        for block in parent.blocks[:-1]:
            child.blocks.append(self.allocator.fork(block))  # clean: near miss, the child is released when the tail fails
        tail = self.allocator.allocate()  # clean: appended to the child
        if tail is None:
            self._release(child)
            return None
        child.blocks.append(tail)
        self.running.append(child)
        return child

    def fork_beams(self, parent: Sequence, width: int) -> List[List[int]]:
        """Block tables for a beam step, released by drop_beams()."""
        tables: List[List[int]] = []
        for _ in range(width):
            table = [self.allocator.fork(b) for b in parent.blocks[:-1]]  # leak: the table in hand is lost when no tail is left
            tail = self.allocator.allocate()  # clean: appended to the table that is returned
            if tail is None:
                break
            table.append(tail)
            tables.append(table)
        return tables

    def drop_beams(self, tables: List[List[int]]) -> None:
        for table in tables:
            for block in table:
                self.allocator.free(block)

    def beam_round(self, parent: Sequence, width: int) -> int:
        tables = self.fork_beams(parent, width)  # clean: handed to drop_beams
        best = len(tables)
        self.drop_beams(tables)
        return best

    def pin_prefix(self, key: str, ntokens: int) -> bool:
        if key in self._pinned_prefix:
            return True
        blocks = self.allocator.allocate_many(-(-ntokens // BLOCK_SIZE))  # clean: kept in the table, unpin_prefix frees
        if blocks is None:
            return False
        self._pinned_prefix[key] = blocks
        return True

    def unpin_prefix(self, key: str) -> None:
        for block in self._pinned_prefix.pop(key, ()):
            self.allocator.free(block)

    def probe_capacity(self, want: int) -> int:
        """Largest n <= want that can be had right now."""
        taken: List[int] = []
        while len(taken) < want:
            block = self.allocator.allocate()  # clean: near miss, every block taken is freed after the loop
            if block is None:
                break
            taken.append(block)
        for block in taken:
            self.allocator.free(block)
        return len(taken)

    def swap_tail(self, seq: Sequence) -> bool:
        """Give the sequence a private last block (copy on write)."""
        if not seq.blocks:
            return False
        fresh = self.allocator.allocate()  # clean: near miss, replaces the old tail which is freed
        if fresh is None:
            return False
        old, seq.blocks[-1] = seq.blocks[-1], fresh
        self.allocator.free(old)
        return True

    def reset(self, seq: Sequence) -> None:
        self._release(seq)
        seq.generated = 0
