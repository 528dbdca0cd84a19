"""Paged KV cache block manager: allocation, copy-on-write forks and swapping."""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple


@dataclass
class Sequence:
    seq_id: int
    num_tokens: int
    lora_id: int = 0
    is_encoder_decoder: bool = False
    encoder_tokens: int = 0
    finished: bool = False
    prefix_hint: List[int] = field(default_factory=list)


class BlockAllocator:
    """Ref-counted free list of fixed-size KV blocks on one device."""

    def __init__(self, num_blocks: int, device: str) -> None:
        self.device = device
        self._free: List[int] = list(range(num_blocks - 1, -1, -1))
        self._refs: List[int] = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def refcount(self, block: int) -> int:
        return self._refs[block]

    def allocate(self) -> Optional[int]:
        if not self._free:
            return None
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def allocate_many(self, n: int) -> Optional[List[int]]:
        if len(self._free) < n:
            return None
        return [
            self.allocate()  # clean: the count was checked, the list goes to the caller
            for _ in range(n)
        ]

    def incref(self, block: int) -> None:
        assert self._refs[block] > 0
        self._refs[block] += 1

    def free(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)


class BlockManager:
    def __init__(self, num_gpu: int, num_cpu: int, block_size: int = 16) -> None:
        self.block_size = block_size
        self.gpu = BlockAllocator(num_gpu, "cuda")
        self.cpu = BlockAllocator(num_cpu, "cpu")
        self.tables: Dict[int, List[int]] = {}
        self.cross_tables: Dict[int, List[int]] = {}
        self.swapped: Dict[int, List[int]] = {}
        # padded entries of a block table point here
        self.null_block = self.gpu.allocate()  # clean: process-lifetime null block

    def _blocks_for(self, tokens: int) -> int:
        return math.ceil(tokens / self.block_size)

    def allocate(self, seq: Sequence) -> bool:
        table: List[int] = []
        for _ in range(self._blocks_for(seq.num_tokens)):
            block = self.gpu.allocate()  # clean: freed on shortage, else kept in the table
            if block is None:
                for taken in table:
                    self.gpu.free(taken)
                return False
            table.append(block)
        if seq.is_encoder_decoder:
            cross = self.gpu.allocate_many(self._blocks_for(seq.encoder_tokens))  # clean: near miss, kept under the same flag that free() tests
            if cross is None:
                for taken in table:
                    self.gpu.free(taken)
                return False
            self.cross_tables[seq.seq_id] = cross
        self.tables[seq.seq_id] = table
        return True

    def allocate_shared(self, seq: Sequence, prefix: List[int], limit: int) -> bool:
        """Start a table from blocks which another sequence has computed already."""
        table: List[int] = []
        for block in prefix:
            self.gpu.incref(block)  # leak: the block on which the loop breaks is counted but in no table
            if (len(table) + 1) * self.block_size > limit:
                break
            table.append(block)
        rest = self._blocks_for(seq.num_tokens) - len(table)
        fresh = self.gpu.allocate_many(max(rest, 0))  # clean: None or into the table
        if fresh is None:
            for block in table:
                self.gpu.free(block)
            return False
        self.tables[seq.seq_id] = table + fresh
        return True

    def append_slots(self, seq: Sequence, lookahead: int) -> Optional[List[Tuple[int, int]]]:
        table = self.tables[seq.seq_id]
        copies: List[Tuple[int, int]] = []
        last = table[-1]
        if self.gpu.refcount(last) > 1:
            fresh = self.gpu.allocate()  # clean: near miss, replaces the shared block, whose count is lowered
            if fresh is None:
                return None
            table[-1] = fresh
            self.gpu.free(last)
            copies.append((last, fresh))
        while len(table) * self.block_size < seq.num_tokens + lookahead:
            block = self.gpu.allocate()  # clean: near miss, partial growth stays in the table
            if block is None:
                return None
            table.append(block)
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        src = self.tables[parent.seq_id]
        for block in src:
            self.gpu.incref(block)  # clean: the child's table holds the counts
        self.tables[child.seq_id] = list(src)

    def swap_out(self, seq: Sequence) -> Optional[List[Tuple[int, int]]]:
        table = self.tables.pop(seq.seq_id)
        host: List[int] = []
        for _ in table:
            dst = self.cpu.allocate()  # clean: rolled back on shortage, else in the swap table
            if dst is None:
                for taken in host:
                    self.cpu.free(taken)
                self.tables[seq.seq_id] = table
                return None
            host.append(dst)
        for src in table:
            self.gpu.free(src)
        self.swapped[seq.seq_id] = host
        return list(zip(table, host))

    def swap_in(self, seq: Sequence) -> Optional[List[Tuple[int, int]]]:
        host = self.swapped.pop(seq.seq_id)
        mapping: List[Tuple[int, int]] = []
        for src in host:
            dst = self.gpu.allocate()  # leak: shortage midway restores the host table but drops the blocks gathered
            if dst is None:
                self.swapped[seq.seq_id] = host
                return None
            mapping.append((src, dst))
        for src in host:
            self.cpu.free(src)
        self.tables[seq.seq_id] = [dst for _, dst in mapping]
        return mapping

    def free(self, seq: Sequence) -> None:
        for block in self.tables.pop(seq.seq_id, []):
            self.gpu.free(block)
        for block in self.swapped.pop(seq.seq_id, []):
            self.cpu.free(block)
        if seq.is_encoder_decoder:
            for block in self.cross_tables.pop(seq.seq_id, []):
                self.gpu.free(block)


class StepPlanner:
    """Chooses which waiting sequences enter the next step."""

    def __init__(self, manager: BlockManager, max_tokens: int, max_loras: int) -> None:
        self.manager = manager
        self.max_tokens = max_tokens
        self.max_loras = max_loras
        self.running: List[Sequence] = []

    def admit(self, waiting: List[Sequence]) -> List[Sequence]:
        budget = self.max_tokens
        loras = {s.lora_id for s in self.running if s.lora_id}
        admitted: List[Sequence] = []
        for seq in list(waiting):
            if seq.num_tokens > budget:
                break
            if not self.manager.allocate(seq):  # leak: the adapter-limit `continue` leaves the blocks with a sequence that stays waiting
                break
            if seq.lora_id and seq.lora_id not in loras and len(loras) >= self.max_loras:
                continue
            loras.add(seq.lora_id)
            budget -= seq.num_tokens
            waiting.remove(seq)
            admitted.append(seq)
        self.running.extend(admitted)
        return admitted

    def admit_one(self, seq: Sequence) -> bool:
        if seq.num_tokens > self.max_tokens:
            return False
        if not self.manager.allocate(seq):  # clean: goes to running, freed by reap
            return False
        self.running.append(seq)
        return True

    def reap(self) -> None:
        still: List[Sequence] = []
        for seq in self.running:
            if seq.finished:
                self.manager.free(seq)
            else:
                still.append(seq)
        self.running = still
