"""Paged KV cache: block allocator and scheduler-side block tables."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional

logger = logging.getLogger(__name__)


@dataclass
class PhysicalBlock:
    number: int
    ref_count: int = 0


class NoFreeBlocks(RuntimeError):
    pass


class BlockAllocator:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free: Deque[PhysicalBlock] = deque(PhysicalBlock(i) for i in range(num_blocks))

    def allocate(self) -> PhysicalBlock:
        if not self._free:
            raise NoFreeBlocks()
        block = self._free.popleft()  # clean: returned with one reference
        block.ref_count = 1
        return block

    def free(self, block: PhysicalBlock) -> None:
        if block.ref_count <= 0:
            raise ValueError(f"double free of block {block.number}")
        block.ref_count -= 1
        if block.ref_count == 0:
            self._free.append(block)

    def fork(self, block: PhysicalBlock) -> PhysicalBlock:
        block.ref_count += 1
        return block

    def num_free(self) -> int:
        return len(self._free)


@dataclass
class Sequence:
    seq_id: int
    tokens: List[int]
    blocks: List[PhysicalBlock] = field(default_factory=list)
    swapped: bool = False

    def blocks_needed(self, block_size: int) -> int:
        return (len(self.tokens) + block_size - 1) // block_size


class BlockSpaceManager:
    def __init__(self, num_blocks: int, block_size: int, watermark: int = 2) -> None:
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.block_size = block_size
        self.watermark = watermark
        self.tables: Dict[int, List[PhysicalBlock]] = {}

    def can_allocate(self, seq: Sequence) -> bool:
        need = seq.blocks_needed(self.block_size)
        return self.allocator.num_free() - need >= self.watermark

    def allocate(self, seq: Sequence) -> None:
        if seq.seq_id in self.tables:
            return
        table = []
        for _ in range(seq.blocks_needed(self.block_size)):
            table.append(self.allocator.allocate())  # clean: stored in tables, freed by free(seq)
        self.tables[seq.seq_id] = table

    def try_allocate(self, seq: Sequence, limit: int) -> bool:
        if seq.seq_id in self.tables:
            return True
        table: List[PhysicalBlock] = []
        for _ in range(seq.blocks_needed(self.block_size)):
            if len(table) >= limit or self.allocator.num_free() == 0:
                logger.debug("seq %d over limit %d", seq.seq_id, limit)
                return False
            table.append(self.allocator.allocate())  # leak: the partial table is dropped when the limit is hit
        self.tables[seq.seq_id] = table
        return True

    def try_allocate_all(self, seq: Sequence) -> bool:
        if seq.seq_id in self.tables:
            return True
        table: List[PhysicalBlock] = []
        try:
            for _ in range(seq.blocks_needed(self.block_size)):
                table.append(self.allocator.allocate())  # clean: near miss, the handler frees the partial table
        except NoFreeBlocks:
            for block in table:
                self.allocator.free(block)
            return False
        self.tables[seq.seq_id] = table
        return True

    def append_slot(self, seq: Sequence) -> Optional[int]:
        table = self.tables[seq.seq_id]
        if len(table) < seq.blocks_needed(self.block_size):
            table.append(self.allocator.allocate())  # clean: table is the list kept in tables
            return table[-1].number
        last = table[-1]
        if last.ref_count == 1:
            return None
        fresh = self.allocator.allocate()  # clean: near miss, takes the shared block's place in the table
        self.allocator.free(last)
        table[-1] = fresh
        return fresh.number

    def fork(self, parent: Sequence, child: Sequence) -> None:
        src = self.tables[parent.seq_id]
        self.free(child)
        self.tables[child.seq_id] = [self.allocator.fork(b) for b in src]  # clean: child table is freed by free(child)

    def free(self, seq: Sequence) -> None:
        table = self.tables.pop(seq.seq_id, None)
        if table is None:
            return
        for block in table:
            self.allocator.free(block)

    def swap_in(self, seq: Sequence, host: Dict[int, List[int]]) -> Dict[int, int]:
        mapping: Dict[int, int] = {}
        table: List[PhysicalBlock] = []
        for cpu_block in host.pop(seq.seq_id, []):
            block = self.allocator.allocate()  # clean: appended to the table that is stored
            mapping[cpu_block] = block.number
            table.append(block)
        self.free(seq)
        self.tables[seq.seq_id] = table
        seq.swapped = False
        return mapping


class PrefixCache:
    """Keeps references on the blocks of popular prefixes."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self._entries: Dict[int, PhysicalBlock] = {}

    def insert(self, key: int, block: PhysicalBlock) -> None:
        self._entries[key] = self.allocator.fork(block)  # leak: an existing entry's reference is overwritten

    def lookup(self, key: int) -> Optional[PhysicalBlock]:
        hit = self._entries.get(key)
        return self.allocator.fork(hit) if hit is not None else None  # clean: reference handed to the caller

    def contains(self, keys: List[int]) -> int:
        depth = 0
        for key in keys:
            if self.lookup(key) is None:  # leak: the reference taken by a hit is dropped
                break
            depth += 1
        return depth

    def clear(self) -> None:
        for block in self._entries.values():
            self.allocator.free(block)
        self._entries.clear()


def prefill(manager: BlockSpaceManager, cache: PrefixCache, seq: Sequence, key: int) -> int:
    block = cache.lookup(key)  # leak: a swapped sequence returns with the reference
    if block is None:
        manager.allocate(seq)
        return 0
    if seq.swapped:
        return -1
    seq.blocks.append(block)
    return manager.block_size


def finish(manager: BlockSpaceManager, seq: Sequence) -> None:
    while seq.blocks:
        manager.allocator.free(seq.blocks.pop())
    manager.free(seq)
