"""Paged KV-cache block manager and the scheduler-side sequence bookkeeping."""
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional

logger = logging.getLogger(__name__)


class OutOfBlocks(RuntimeError):
    pass


@dataclass
class Sequence:
    seq_id: int
    tokens: List[int]
    blocks: List[int] = field(default_factory=list)
    swapped: bool = False

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)


class BlockAllocator:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: Deque[int] = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        if not self._free:
            raise OutOfBlocks(f"all {self.num_blocks} blocks in use")
        return self._free.popleft()  # clean: handed to the caller

    def try_allocate(self) -> Optional[int]:
        if not self._free:
            return None
        return self._free.popleft()  # clean: handed to the caller

    def free(self, block: int) -> None:
        self._free.append(block)


class BlockManager:
    def __init__(self, num_gpu: int, num_cpu: int, block_size: int = 16, watermark: int = 2) -> None:
        self.gpu = BlockAllocator(num_gpu)
        self.cpu = BlockAllocator(num_cpu)
        self.block_size = block_size
        self.watermark = watermark
        self.tables: Dict[int, List[int]] = {}
        self.swap_tables: Dict[int, List[int]] = {}

    def _needed(self, seq: Sequence) -> int:
        return (seq.n_tokens + self.block_size - 1) // self.block_size

    def can_allocate(self, seq: Sequence) -> bool:
        return self.gpu.num_free - self._needed(seq) >= self.watermark

    def allocate_seq(self, seq: Sequence) -> bool:
        """All-or-nothing."""
        table: List[int] = []
        for _ in range(self._needed(seq)):
            blk = self.gpu.try_allocate()  # clean: near miss, partial table is rolled back
            if blk is None:
                for b in table:
                    self.gpu.free(b)
                return False
            table.append(blk)
        self.tables.setdefault(seq.seq_id, []).extend(table)
        return True

    def allocate_seq_eager(self, seq: Sequence) -> bool:
        table: List[int] = []
        for _ in range(self._needed(seq)):
            blk = self.gpu.try_allocate()  # leak: blocks already taken are dropped when the pool runs out
            if blk is None:
                logger.info("seq %d does not fit", seq.seq_id)
                return False
            table.append(blk)
        self.tables.setdefault(seq.seq_id, []).extend(table)
        return True

    def append_slot(self, seq: Sequence) -> int:
        table = self.tables[seq.seq_id]
        if seq.n_tokens > len(table) * self.block_size:
            table.append(self.gpu.allocate())  # clean: stored in the block table
        return table[-1]

    def free_seq(self, seq: Sequence) -> None:
        for b in self.tables.pop(seq.seq_id, []):
            self.gpu.free(b)
        for b in self.swap_tables.pop(seq.seq_id, []):
            self.cpu.free(b)

    def swap_out(self, seq: Sequence) -> Dict[int, int]:
        if self.cpu.num_free < len(self.tables[seq.seq_id]):
            raise OutOfBlocks("cpu side cannot take the sequence")
        mapping: Dict[int, int] = {}
        dst: List[int] = []
        for g in self.tables.pop(seq.seq_id):
            c = self.cpu.allocate()  # clean: kept in swap_tables, free_seq returns it
            mapping[g] = c
            dst.append(c)
            self.gpu.free(g)
        self.swap_tables.setdefault(seq.seq_id, []).extend(dst)
        seq.swapped = True
        return mapping

    def swap_in(self, seq: Sequence) -> Dict[int, int]:
        if self.gpu.num_free < len(self.swap_tables[seq.seq_id]):
            raise OutOfBlocks("gpu side cannot take the sequence")
        mapping: Dict[int, int] = {}
        dst: List[int] = []
        for c in self.swap_tables.pop(seq.seq_id):
            g = self.gpu.allocate()  # clean: kept in tables, free_seq returns it
            mapping[c] = g
            dst.append(g)
            self.cpu.free(c)
        self.tables.setdefault(seq.seq_id, []).extend(dst)
        seq.swapped = False
        return mapping

    def rewrite_block(self, seq: Sequence, index: int, dirty: bool) -> Optional[int]:
        fresh = self.gpu.try_allocate()  # leak: not dirty means the fresh block is neither stored nor freed
        if fresh is None:
            return None
        if not dirty:
            return self.tables[seq.seq_id][index]
        old = self.tables[seq.seq_id][index]
        self.tables[seq.seq_id][index] = fresh
        self.gpu.free(old)
        return fresh

    def probe(self) -> bool:
        blk = self.gpu.try_allocate()  # clean: None-checked and freed
        if blk is None:
            return False
        self.gpu.free(blk)
        return True

    def reserve_pair(self, seq: Sequence) -> bool:
        g = self.gpu.try_allocate()  # leak: no rollback when the cpu side has no block
        if g is None:
            return False
        c = self.cpu.try_allocate()  # clean: stored when present
        if c is None:
            return False
        self.tables.setdefault(seq.seq_id, []).append(g)
        self.swap_tables.setdefault(seq.seq_id, []).append(c)
        return True

    def warm(self, n: int) -> int:
        got = [self.gpu.allocate() for _ in range(n)]  # leak: only the first half is freed
        for b in got[: n // 2]:
            self.gpu.free(b)
        return len(got)

    def self_test(self, n: int) -> bool:
        got = [self.gpu.allocate() for _ in range(n)]  # clean: all are freed
        unique = len(set(got)) == len(got)
        for b in got:
            self.gpu.free(b)
        return unique
