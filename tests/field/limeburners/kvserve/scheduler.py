"""Admission, growth, preemption and completion of sequences."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional

from .blocks import BLOCK_TOKENS, Block, BlockAllocator, PrefixCache


@dataclass
class Sequence:
    seq_id: int
    tokens: List[int]
    max_new: int = 64
    blocks: List[Block] = field(default_factory=list)
    draft: Optional[Block] = None
    produced: int = 0

    @property
    def slots_left(self) -> int:
        return len(self.blocks) * BLOCK_TOKENS - len(self.tokens)


class Scheduler:
    def __init__(self, allocator: BlockAllocator, cache: PrefixCache):
        self.allocator = allocator
        self.cache = cache
        self.waiting: Deque[Sequence] = deque()
        self.running: Dict[int, Sequence] = {}
        self.parked: Dict[int, Sequence] = {}

    def submit(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def _needed(self, seq: Sequence) -> int:
        return -(-len(seq.tokens) // BLOCK_TOKENS)

    def admit(self) -> List[Sequence]:
        """Moves as many sequences as fit from waiting to running."""
        started = []
        while self.waiting:
            seq = self.waiting[0]
            shared = self.cache.match(seq.tokens)  # leak: the break for lack of blocks keeps the references
            fresh = self.allocator.allocate_many(self._needed(seq) - len(shared))  # clean: into seq, or None
            if fresh is None:
                break
            seq.blocks = shared + fresh
            self.running[seq.seq_id] = self.waiting.popleft()
            started.append(seq)
        return started

    def readmit(self, seq_id: int) -> bool:
        """A parked sequence comes back; the same work with the rollback."""
        seq = self.parked[seq_id]
        shared = self.cache.match(seq.tokens)  # clean: dropped, or in seq
        fresh = self.allocator.allocate_many(self._needed(seq) - len(shared))  # clean: into seq, or None
        if fresh is None:
            for block in shared:
                self.allocator.decref(block)
            return False
        seq.blocks = shared + fresh
        self.running[seq_id] = self.parked.pop(seq_id)
        return True

    def grow(self, seq: Sequence) -> bool:
        if seq.slots_left > 0:
            return True
        block = self.allocator.allocate()  # clean: near miss, retry after eviction only when it is None
        if block is None and self.cache.evict():
            block = self.allocator.allocate()  # clean: into seq.blocks, or None
        if block is None:
            return False
        seq.blocks.append(block)
        return True

    def start_draft(self, seq: Sequence) -> bool:
        """Scratch block for speculative tokens; released by accept, reject and finish."""
        if seq.draft is None:
            seq.draft = self.allocator.allocate()  # clean: near miss, moved or dropped by the others
        return seq.draft is not None

    def accept_draft(self, seq: Sequence) -> None:
        seq.blocks.append(seq.draft)
        seq.draft = None

    def reject_draft(self, seq: Sequence) -> None:
        if seq.draft is not None:
            self.allocator.decref(seq.draft)
            seq.draft = None

    def fork(self, parent: Sequence, seq_id: int) -> Sequence:
        """Beam search: the child shares all blocks of the parent."""
        child = Sequence(seq_id, list(parent.tokens), parent.max_new)
        for block in parent.blocks:
            child.blocks.append(self.allocator.incref(block))  # clean: dropped when the child finishes
        self.running[seq_id] = child
        return child

    def fork_n(self, parent: Sequence, ids: List[int], limit: int) -> List[Sequence]:
        """Only children under the running limit are registered."""
        children = []
        for seq_id in ids:
            held = [self.allocator.incref(b) for b in parent.blocks]  # leak: lost by the continue
            if len(self.running) >= limit:
                continue
            child = Sequence(seq_id, list(parent.tokens), parent.max_new, held)
            self.running[seq_id] = child
            children.append(child)
        return children

    def finish(self, seq_id: int) -> None:
        seq = self.running.pop(seq_id)
        self.reject_draft(seq)
        while seq.blocks:
            self.allocator.decref(seq.blocks.pop())

    def preempt(self, seq_id: int) -> None:
        """Recompute later: all blocks are dropped."""
        seq = self.running.pop(seq_id)
        self.reject_draft(seq)
        for block in seq.blocks:
            self.allocator.decref(block)
        seq.blocks = []
        self.parked[seq_id] = seq
