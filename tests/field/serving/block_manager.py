"""Paged KV block manager: sequences own a list of physical blocks, shared through ref counts."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional

logger = logging.getLogger(__name__)


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0
    block_hash: Optional[int] = None


class BlockAllocator:
    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self._free: Deque[Block] = deque(self.blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[Block]:
        if not self._free:
            return None
        block = self._free.popleft()
        block.ref_cnt = 1
        return block

    def free(self, block: Block) -> None:
        block.ref_cnt -= 1
        if block.ref_cnt == 0:
            block.block_hash = None
            self._free.append(block)


@dataclass
class Sequence:
    seq_id: int
    num_tokens: int
    block_table: List[Block] = field(default_factory=list)


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int, watermark: int = 2) -> None:
        self.block_size = block_size
        self.watermark = watermark
        self.allocator = BlockAllocator(num_blocks)
        self.tables: Dict[int, List[Block]] = {}
        self.draft_tables: Dict[int, List[Block]] = {}

    def _need(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    def allocate_sequence(self, seq: Sequence) -> bool:
        assert seq.seq_id not in self.tables
        table: List[Block] = []
        for _ in range(self._need(seq.num_tokens)):
            block = self.allocator.allocate()  # clean: stored in the table, rolled back when the pool runs out
            if block is None:
                for b in table:
                    self.allocator.free(b)
                return False
            table.append(block)
        self.tables[seq.seq_id] = table
        return True

    def allocate_draft(self, seq: Sequence, lookahead: int) -> bool:
        table: List[Block] = []
        for _ in range(self._need(lookahead)):
            block = self.allocator.allocate()  # leak: blocks taken so far are dropped when the pool runs out
            if block is None:
                logger.debug("no room for %d draft tokens of %d", lookahead, seq.seq_id)
                return False
            table.append(block)
        self.draft_tables[seq.seq_id] = table
        return True

    def append_slot(self, seq: Sequence) -> bool:
        table = self.tables[seq.seq_id]
        if seq.num_tokens % self.block_size != 0:
            return True
        block = self.allocator.allocate()  # clean: None is checked, else goes into the sequence's table
        if block is None:
            return False
        table.append(block)
        return True

    def copy_on_write(self, seq_id: int, idx: int) -> Optional[tuple[int, int]]:
        table = self.tables[seq_id]
        old = table[idx]
        if old.ref_cnt == 1:
            return None
        new = self.allocator.allocate()  # clean: replaces the shared block in the table, which is freed
        if new is None:
            raise RuntimeError("out of blocks during copy on write")
        table[idx] = new
        self.allocator.free(old)
        return old.block_id, new.block_id

    def reserve_scratch(self, seq_id: int) -> Optional[int]:
        block = self.allocator.allocate()  # leak: below the watermark the block is not given back
        if block is None:
            return None
        if self.allocator.num_free < self.watermark:
            logger.warning("watermark reached, seq %d goes without scratch", seq_id)
            return None
        self.tables.setdefault(seq_id, []).append(block)
        return block.block_id

    def reserve_sink(self, seq_id: int) -> Optional[int]:
        block = self.allocator.allocate()  # clean: near miss, the watermark exit frees it
        if block is None:
            return None
        if self.allocator.num_free < self.watermark:
            self.allocator.free(block)
            return None
        self.tables.setdefault(seq_id, []).append(block)
        return block.block_id

    def free_sequence(self, seq_id: int) -> None:
        for block in reversed(self.tables.pop(seq_id, [])):
            self.allocator.free(block)

    def free_draft(self, seq_id: int) -> None:
        for block in self.draft_tables.pop(seq_id, []):
            self.allocator.free(block)

    def probe(self) -> bool:
        """True when at least one block can still be handed out."""
        return self.allocator.allocate() is not None  # leak: the block of the probe is discarded

    def probe_two(self) -> bool:
        first = self.allocator.allocate()  # clean: near miss, freed on every path where it is not None
        if first is None:
            return False
        second = self.allocator.allocate()  # clean: near miss, freed when it was got
        ok = second is not None
        if ok:
            self.allocator.free(second)
        self.allocator.free(first)
        return ok
