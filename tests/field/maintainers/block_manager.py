"""KV block manager and the scheduler pieces that use it."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional


@dataclass
class Sequence:
    seq_id: int
    tokens: List[int]
    blocks: List[int] = field(default_factory=list)
    finished: bool = False
    max_blocks: int = 64


class BlockAllocator:
    """Hands out physical block numbers."""

    def __init__(self, num_blocks: int, block_size: int = 16):
        self.block_size = block_size
        self._free: Deque[int] = deque(range(num_blocks))

    def allocate(self) -> Optional[int]:
        if not self._free:
            return None
        return self._free.popleft()  # clean: handed to the caller

    def allocate_many(self, n: int) -> Optional[List[int]]:
        got: List[int] = []
        while len(got) < n:
            if not self._free:
                self._free.extend(got)
                return None
            got.append(self._free.popleft())  # clean: near miss, the short path puts all of got back
        return got

    def allocate_aligned(self, align: int) -> Optional[int]:
        """A block whose number is a multiple of ``align``."""
        for _ in range(len(self._free)):
            block = self._free.popleft()  # leak: a block that is not aligned is dropped, not put back
            if block % align == 0:
                return block
        return None

    def free(self, block: int) -> None:
        self._free.append(block)

    def free_all(self, blocks: List[int]) -> None:
        for b in blocks:
            self.free(b)

    @property
    def num_free(self) -> int:
        return len(self._free)


class BlockManager:
    def __init__(self, gpu: BlockAllocator, cpu: BlockAllocator):
        self.gpu = gpu
        self.cpu = cpu
        self.tables: Dict[int, List[int]] = {}
        self.swapped: Dict[int, List[int]] = {}

    def _need(self, seq: Sequence) -> int:
        size = self.gpu.block_size
        return (len(seq.tokens) + size - 1) // size

    def admit(self, seq: Sequence) -> bool:
        blocks = self.gpu.allocate_many(self._need(seq))  # leak: too long a sequence returns False with the blocks in hand
        if blocks is None:
            return False
        if len(blocks) > seq.max_blocks:
            return False
        self.tables[seq.seq_id] = blocks
        return True

    def append_slot(self, seq: Sequence) -> bool:
        table = self.tables[seq.seq_id]
        if len(table) >= self._need(seq):
            return True
        block = self.gpu.allocate()  # clean: near miss, returns early only where the allocation is None
        if block is None:
            return False
        table.append(block)
        return True

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        if child.seq_id in self.tables:
            return False
        src = self.tables[parent.seq_id]
        copy: List[int] = []
        for _ in src:
            block = self.gpu.allocate()  # clean: near miss, on a shortage all blocks so far are freed
            if block is None:
                self.gpu.free_all(copy)
                return False
            copy.append(block)
        self.tables[child.seq_id] = copy
        return True

    def swap_out(self, seq: Sequence) -> bool:
        table = self.tables.get(seq.seq_id)
        if table is None or seq.seq_id in self.swapped:
            return False
        dst = self.cpu.allocate_many(len(table))  # clean: kept in swapped, which swap_in and release empty
        if dst is None:
            return False
        self.swapped[seq.seq_id] = dst
        self.gpu.free_all(self.tables.pop(seq.seq_id))
        return True

    def swap_in(self, seq: Sequence) -> bool:
        src = self.swapped.get(seq.seq_id)
        if src is None or seq.seq_id in self.tables:
            return False
        dst = self.gpu.allocate_many(len(src))  # clean: goes to tables once it is not None
        if dst is None:
            return False
        self.tables[seq.seq_id] = dst
        self.cpu.free_all(self.swapped.pop(seq.seq_id))
        return True

    def reserve_lookahead(self, seq: Sequence, k: int) -> int:
        """Reserve up to k speculative blocks; returns how many."""
        done = 0
        for _ in range(k):
            block = self.gpu.allocate()  # leak: break on a full table drops the block just taken
            if block is None:
                break
            table = self.tables[seq.seq_id]
            if len(table) >= seq.max_blocks:
                break
            table.append(block)
            done += 1
        return done

    def probe(self, n: int) -> bool:
        """Whether n blocks could be had right now."""
        trial = self.gpu.allocate_many(n)  # leak: only the answer is returned, the trial blocks are not freed
        return trial is not None

    def release(self, seq: Sequence) -> None:
        blocks = self.tables.pop(seq.seq_id, None)
        if blocks is not None:
            self.gpu.free_all(blocks)
        host = self.swapped.pop(seq.seq_id, None)
        if host is not None:
            self.cpu.free_all(host)
