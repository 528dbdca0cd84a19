"""Block tables for the decode engine."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional

logger = logging.getLogger(__name__)


class NoFreeBlocksError(RuntimeError):
    pass


class BlockAllocator:
    """Hands out physical block ids."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free: Deque[int] = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        if not self._free:
            raise NoFreeBlocksError("out of KV blocks")
        return self._free.popleft()

    def free(self, block_id: int) -> None:
        self._free.append(block_id)


@dataclass
class Sequence:
    seq_id: int
    num_tokens: int
    parent_id: Optional[int] = None
    output: List[int] = field(default_factory=list)


class BlockManager:
    def __init__(self, allocator: BlockAllocator, watermark: int = 4) -> None:
        self.allocator = allocator
        self.watermark = watermark
        self.tables: Dict[int, List[int]] = {}

    def _blocks_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.allocator.block_size)

    def allocate_seq(self, seq: Sequence) -> bool:
        need = self._blocks_needed(seq.num_tokens)
        if self.allocator.num_free - need < self.watermark:
            return False
        table = []
        for _ in range(need):
            table.append(self.allocator.allocate())  # clean: table is stored below and freed by free_seq
        self.tables[seq.seq_id] = table
        return True

    def append_slot(self, seq: Sequence) -> int:
        table = self.tables[seq.seq_id]
        if seq.num_tokens % self.allocator.block_size == 0:
            block = self.allocator.allocate()  # clean: goes into the live table of the sequence
            table.append(block)
        return table[-1]

    def fork(self, parent: Sequence, child: Sequence) -> List[int]:
        src = self.tables[parent.seq_id]
        copies: List[int] = []
        for _ in src:
            if self.allocator.num_free == 0:
                logger.warning("fork of %d gave up", parent.seq_id)
                return []
            copies.append(self.allocator.allocate())  # leak: blocks taken so far are dropped when the loop gives up
        self.tables[child.seq_id] = copies
        return copies

    def fork_copied(self, parent: Sequence, child: Sequence) -> List[int]:
        src = self.tables[parent.seq_id]
        copies: List[int] = []
        for _ in src:
            if self.allocator.num_free == 0:
                for b in copies:
                    self.allocator.free(b)
                return []
            copies.append(self.allocator.allocate())  # clean: near miss, the early return gives every copy back first
        self.tables[child.seq_id] = copies
        return copies

    def rebuild(self, seq: Sequence) -> None:
        """Give the sequence a fresh table after its prompt was edited."""
        need = self._blocks_needed(seq.num_tokens)
        fresh = [self.allocator.allocate() for _ in range(need)]  # clean: stored in tables, which free_seq empties
        old = self.tables.get(seq.seq_id, [])
        self.tables[seq.seq_id] = fresh
        for block in old:
            self.allocator.free(block)

    def reserve_lookahead(self, seq: Sequence, k: int) -> int:
        """Pre-book blocks for speculative tokens, return how many."""
        if k <= 0:
            return 0
        booked = [self.allocator.allocate() for _ in range(self._blocks_needed(k))]  # leak: unknown sequence returns with the booked blocks in hand
        table = self.tables.get(seq.seq_id)
        if table is None:
            return 0
        table.extend(booked)
        return len(booked)

    def can_probe(self) -> bool:
        try:
            block = self.allocator.allocate()  # clean: freed straight after the probe
        except NoFreeBlocksError:
            return False
        self.allocator.free(block)
        return True

    def free_seq(self, seq: Sequence) -> None:
        for block in self.tables.pop(seq.seq_id, []):
            self.allocator.free(block)

    def reset(self) -> None:
        for table in self.tables.values():
            for block in table:
                self.allocator.free(block)
        self.tables.clear()
