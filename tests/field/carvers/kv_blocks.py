"""Paged KV cache bookkeeping: block allocators, per-sequence tables, step planning."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional, Tuple

logger = logging.getLogger(__name__)


class OutOfBlocks(RuntimeError):
    pass


class BlockAllocator:
    def __init__(self, name: str, num_blocks: int, block_size: int = 16) -> None:
        self.name = name
        self.block_size = block_size
        self._free: Deque[int] = deque(range(num_blocks))
        self._refs: List[int] = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[int]:
        if not self._free:
            return None
        block = self._free.popleft()
        self._refs[block] = 1
        return block

    def allocate_many(self, count: int) -> Optional[List[int]]:
        """All or nothing."""
        if count > len(self._free):
            return None
        out: List[int] = []
        for _ in range(count):
            block = self._free.popleft()
            self._refs[block] = 1
            out.append(block)
        return out

    def share(self, block: int) -> int:
        assert self._refs[block] > 0
        self._refs[block] += 1
        return block

    def ref_count(self, block: int) -> int:
        return self._refs[block]

    def free(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)


@dataclass
class SeqRequest:
    seq_id: int
    prompt_len: int
    draft: List[int] = field(default_factory=list)
    rejected: bool = False


class CacheManager:
    def __init__(self, gpu: BlockAllocator, cpu: BlockAllocator) -> None:
        self.gpu = gpu
        self.cpu = cpu
        self.tables: Dict[int, List[int]] = {}
        self.swapped: Dict[int, List[int]] = {}
        self.mirrors: Dict[int, List[int]] = {}

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.gpu.block_size)

    def admit(self, seq_id: int, tokens: int) -> bool:
        if seq_id in self.tables:
            return True
        blocks = self.gpu.allocate_many(self.blocks_for(tokens))  # clean: moved into the table, freed by free_sequence
        if blocks is None:
            return False
        self.tables[seq_id] = blocks
        return True

    def append_slot(self, seq_id: int) -> bool:
        block = self.gpu.allocate()  # clean: near miss, None leaves early, otherwise appended to the table
        if block is None:
            return False
        self.tables[seq_id].append(block)
        return True

    def fork(self, parent: int, child: int) -> None:
        self.tables[child] = [self.gpu.share(b) for b in self.tables[parent]]  # clean: the child's table owns the new references

    def copy_on_write(self, seq_id: int, index: int) -> Optional[Tuple[int, int]]:
        table = self.tables[seq_id]
        old = table[index]
        if self.gpu.ref_count(old) == 1:
            return None
        fresh = self.gpu.allocate()  # clean: near miss, takes the old block's place and the old reference is freed
        if fresh is None:
            raise OutOfBlocks(self.gpu.name)
        table[index] = fresh
        self.gpu.free(old)
        return old, fresh

    def swap_out(self, seq_id: int) -> Optional[Dict[int, int]]:
        src = self.tables[seq_id]
        mapping: Dict[int, int] = {}
        for block in src:
            dst = self.cpu.allocate()  # leak: when the host pool runs dry midway the mapping is dropped with the blocks taken so far
            if dst is None:
                logger.warning("cpu cache exhausted while swapping out seq %d", seq_id)
                return None
            mapping[block] = dst
        self.swapped[seq_id] = list(mapping.values())
        for block in self.tables.pop(seq_id):
            self.gpu.free(block)
        return mapping

    def swap_in(self, seq_id: int) -> Optional[Dict[int, int]]:
        taken: List[int] = []
        for _ in self.swapped[seq_id]:
            dst = self.gpu.allocate()  # clean: near miss, all taken so far are freed on failure
            if dst is None:
                for block in taken:
                    self.gpu.free(block)
                return None
            taken.append(dst)
        self.tables[seq_id] = taken
        host = self.swapped.pop(seq_id)
        mapping = dict(zip(host, taken))
        for block in host:
            self.cpu.free(block)
        return mapping

    def free_sequence(self, seq_id: int) -> None:
        for block in self.tables.pop(seq_id, ()):
            self.gpu.free(block)
        for block in self.swapped.pop(seq_id, ()):
            self.cpu.free(block)
        for block in self.mirrors.pop(seq_id, ()):
            self.cpu.free(block)


class SpeculativeScorer:
    """Runs a draft through the target model with one scratch block."""

    def __init__(self, manager: CacheManager, vocab: int = 32000) -> None:
        self.manager = manager
        self.vocab = vocab

    def accepted_prefix(self, req: SeqRequest) -> int:
        pool = self.manager.gpu
        scratch = pool.allocate()  # leak: an empty draft returns before free
        if scratch is None:
            return 0
        if not req.draft:
            return 0
        accepted = 0
        for token in req.draft:
            if token >= self.vocab:
                break
            accepted += 1
        pool.free(scratch)
        return accepted

    def probe(self, req: SeqRequest) -> bool:
        pool = self.manager.gpu
        scratch = pool.allocate()  # clean: near miss, freed right after the look, before both returns
        usable = scratch is not None and scratch % 2 == 0
        if scratch is not None:
            pool.free(scratch)
        if not usable:
            return False
        return bool(req.draft)


class StepPlanner:
    def __init__(self, manager: CacheManager, token_budget: int) -> None:
        self.manager = manager
        self.token_budget = token_budget
        self.running: List[int] = []

    def plan_prefill(self, waiting: List[SeqRequest]) -> List[int]:
        budget = self.token_budget
        scheduled: List[int] = []
        for req in waiting:
            blocks = self.manager.gpu.allocate_many(self.manager.blocks_for(req.prompt_len))  # leak: continue on an exceeded budget drops the list
            if blocks is None:
                break
            if req.prompt_len > budget:
                req.rejected = True
                continue
            budget -= req.prompt_len
            self.manager.tables[req.seq_id] = blocks
            scheduled.append(req.seq_id)
        self.running.extend(scheduled)
        return scheduled

    def plan_chunked(self, waiting: List[SeqRequest], chunk: int) -> List[int]:
        scheduled: List[int] = []
        budget = self.token_budget
        for req in waiting:
            size = min(chunk, req.prompt_len)
            blocks = self.manager.gpu.allocate_many(self.manager.blocks_for(size))  # clean: near miss, freed before continue, else in the table
            if blocks is None:
                break
            if size > budget:
                for block in blocks:
                    self.manager.gpu.free(block)
                continue
            budget -= size
            self.manager.tables.setdefault(req.seq_id, []).extend(blocks)
            scheduled.append(req.seq_id)
        self.running.extend(scheduled)
        return scheduled

    def mirror_block(self, seq_id: int) -> Optional[Tuple[int, int]]:
        device_block = self.manager.gpu.allocate()  # leak: not freed when the host block cannot be had
        if device_block is None:
            return None
        host_block = self.manager.cpu.allocate()  # clean: None returns, otherwise stored in mirrors
        if host_block is None:
            return None
        self.manager.tables.setdefault(seq_id, []).append(device_block)
        self.manager.mirrors.setdefault(seq_id, []).append(host_block)
        return device_block, host_block

    def finish(self, seq_id: int) -> None:
        self.running.remove(seq_id)
        self.manager.free_sequence(seq_id)
