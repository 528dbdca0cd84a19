"""Paged KV cache bookkeeping: device and host block allocators plus block tables."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional


class BlockAllocator:
    """Reference-counted pool of fixed-size block ids."""

    def __init__(self, num_blocks: int) -> None:
        self._free: Deque[int] = deque(range(num_blocks))
        self._refs: Dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[int]:
        if not self._free:
            return None
        block_id = self._free.popleft()  # clean: counted and handed to the caller
        self._refs[block_id] = 1
        return block_id

    def allocate_many(self, count: int) -> Optional[List[int]]:
        if count > len(self._free):
            return None
        ids = [self._free.popleft() for _ in range(count)]  # clean: the whole list goes to the caller
        self._refs.update((block_id, 1) for block_id in ids)
        return ids

    def retain(self, block_id: int) -> None:
        self._refs[block_id] += 1  # clean: the reference belongs to the caller

    def refcount(self, block_id: int) -> int:
        return self._refs.get(block_id, 0)

    def free(self, block_id: int) -> None:
        left = self._refs[block_id] - 1
        if left:
            self._refs[block_id] = left
            return
        del self._refs[block_id]
        self._free.append(block_id)


@dataclass
class Sequence:
    seq_id: int
    tokens: List[int] = field(default_factory=list)
    finished: bool = False


class BlockSpaceManager:
    """Maps live sequences onto device blocks and preempted ones onto host blocks."""

    def __init__(self, gpu: BlockAllocator, cpu: BlockAllocator, block_size: int) -> None:
        self.gpu = gpu
        self.cpu = cpu
        self.block_size = block_size
        self.tables: Dict[int, List[int]] = {}
        self.swapped: Dict[int, List[int]] = {}

    def admit(self, seq: Sequence) -> bool:
        if seq.seq_id in self.tables:
            return True
        if seq.seq_id in self.swapped:
            return False
        need = -(-len(seq.tokens) // self.block_size)
        blocks = self.gpu.allocate_many(need)  # clean: kept in the table until free_sequence or swap_out
        if blocks is None:
            return False
        self.tables[seq.seq_id] = blocks
        return True

    def append_slot(self, seq: Sequence) -> Optional[int]:
        table = self.tables[seq.seq_id]
        if len(seq.tokens) % self.block_size:
            return table[-1]
        block = self.gpu.allocate()  # clean: near miss, the early return is the None case
        if block is None:
            return None
        table.append(block)
        return block

    def make_writable(self, seq: Sequence) -> Optional[int]:
        """Give the sequence a private copy of its last block."""
        table = self.tables[seq.seq_id]
        last = table[-1]
        if self.gpu.refcount(last) == 1:
            return last
        fresh = self.gpu.allocate()  # clean: near miss, the slot it overwrites is freed afterwards
        if fresh is None:
            return None
        table[-1] = fresh
        self.gpu.free(last)
        return fresh

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        if child.seq_id in self.tables:
            return False
        shared = self.tables[parent.seq_id]
        for block in shared:
            self.gpu.retain(block)  # leak: the references stay when no tail block is left
        tail = self.gpu.allocate()  # clean: becomes part of the child's table
        if tail is None:
            return False
        self.tables[child.seq_id] = [*shared, tail]
        return True

    def share_prefix(self, seq: Sequence, tokens: int) -> List[int]:
        """Retain the full blocks of the first `tokens` tokens; the caller frees them."""
        shared: List[int] = []
        for block in self.tables.get(seq.seq_id, ()):
            self.gpu.retain(block)  # leak: the block at which the walk stops is retained but not listed
            if tokens < self.block_size:
                break
            tokens -= self.block_size
            shared.append(block)
        return shared

    def swap_out(self, seq: Sequence) -> Optional[Dict[int, int]]:
        mapping: Dict[int, int] = {}
        for block in self.tables[seq.seq_id]:
            host = self.cpu.allocate()  # clean: near miss, a partial mapping is rolled back
            if host is None:
                for taken in mapping.values():
                    self.cpu.free(taken)
                return None
            mapping[block] = host
        for block in self.tables.pop(seq.seq_id):
            self.gpu.free(block)
        self.swapped[seq.seq_id] = list(mapping.values())
        return mapping

    def swap_in(self, seq: Sequence) -> Optional[Dict[int, int]]:
        mapping: Dict[int, int] = {}
        for host in self.swapped[seq.seq_id]:
            block = self.gpu.allocate()  # leak: running out half way drops the blocks already mapped
            if block is None:
                return None
            mapping[host] = block
        for host in self.swapped.pop(seq.seq_id):
            self.cpu.free(host)
        self.tables[seq.seq_id] = list(mapping.values())
        return mapping

    def free_sequence(self, seq: Sequence) -> None:
        for block in self.tables.pop(seq.seq_id, ()):
            self.gpu.free(block)
        for host in self.swapped.pop(seq.seq_id, ()):
            self.cpu.free(host)


def contiguous_run(alloc: BlockAllocator, rounds: int) -> int:
    """Probe how often two neighbouring blocks are handed out together."""
    hits = 0
    for _ in range(rounds):
        pair = alloc.allocate_many(2)  # leak: continue on a non-adjacent pair skips the frees
        if pair is None:
            break
        if abs(pair[0] - pair[1]) != 1:
            continue
        hits += 1
        for block in pair:
            alloc.free(block)
    return hits
