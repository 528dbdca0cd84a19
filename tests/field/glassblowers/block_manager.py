"""Paged KV block manager: admission, copy-on-write, forking, lookahead and host swap."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, Dict, List, Optional, Sequence, Tuple

logger = logging.getLogger(__name__)


class NoFreeBlocks(RuntimeError):
    pass


@dataclass
class PhysicalBlock:
    device: str
    number: int
    ref_count: int = 0


class BlockAllocator:
    """FIFO free list of fixed-size blocks with per-block reference counts."""

    def __init__(self, device: str, num_blocks: int) -> None:
        self.device = device
        self.num_blocks = num_blocks
        self._free: Deque[PhysicalBlock] = deque(
            PhysicalBlock(device, i) for i in range(num_blocks)
        )

    def allocate(self) -> PhysicalBlock:
        if not self._free:
            raise NoFreeBlocks(self.device)
        block = self._free.popleft()  # clean: returned to the caller with one reference
        block.ref_count = 1
        return block

    def share(self, block: PhysicalBlock) -> PhysicalBlock:
        block.ref_count += 1
        return block

    def free(self, block: PhysicalBlock) -> None:
        if block.ref_count <= 0:
            raise ValueError(f"double free of {self.device} block {block.number}")
        block.ref_count -= 1
        if block.ref_count == 0:
            self._free.append(block)

    def num_free(self) -> int:
        return len(self._free)


CopyFn = Callable[[PhysicalBlock, PhysicalBlock], bool]


class BlockManager:
    def __init__(
        self,
        gpu_blocks: int,
        cpu_blocks: int,
        copy_fn: CopyFn,
        block_size: int = 16,
        watermark: float = 0.01,
    ) -> None:
        self.block_size = block_size
        self.gpu = BlockAllocator("cuda", gpu_blocks)
        self.cpu = BlockAllocator("cpu", cpu_blocks)
        self.copy_fn = copy_fn
        self.watermark_blocks = int(watermark * gpu_blocks)
        self.tables: Dict[int, List[PhysicalBlock]] = {}
        self.swapped: Dict[int, List[PhysicalBlock]] = {}
        self.lookahead: Dict[int, List[PhysicalBlock]] = {}
        self.tail_copies: Dict[int, PhysicalBlock] = {}

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # -- admission ---------------------------------------------------------

    def admit(self, seq_id: int, num_tokens: int) -> bool:
        need = self.blocks_for(num_tokens)
        if self.gpu.num_free() - need < self.watermark_blocks:
            return False
        table: List[PhysicalBlock] = []
        for _ in range(need):
            table.append(self.gpu.allocate())  # clean: kept in self.tables, free_seq() empties it
        self.tables[seq_id] = table
        return True

    def admit_group(self, seq_ids: Sequence[int], num_tokens: int) -> bool:
        """All sequences of a best-of-n group start on the same prompt blocks."""
        first, *others = seq_ids
        prompt: List[PhysicalBlock] = []
        for _ in range(self.blocks_for(num_tokens)):
            if self.gpu.num_free() <= self.watermark_blocks:
                logger.debug("group %s does not fit, leaving it waiting", seq_ids)
                return False
            prompt.append(self.gpu.allocate())  # leak: blocks taken so far dropped when the watermark is hit half way
        self.tables[first] = prompt
        for seq_id in others:
            self.tables[seq_id] = [self.gpu.share(b) for b in prompt]  # clean: each reference sits in a table
        return True

    def graft_prefix(
        self, seq_id: int, prefix: Sequence[PhysicalBlock], suffix_tokens: int
    ) -> bool:
        table = [self.gpu.share(b) for b in prefix]  # leak: references on the prefix kept when the suffix does not fit
        suffix: List[PhysicalBlock] = []
        try:
            for _ in range(self.blocks_for(suffix_tokens)):
                suffix.append(self.gpu.allocate())  # clean: freed in the handler or put in the table
        except NoFreeBlocks:
            for block in suffix:
                self.gpu.free(block)
            return False
        self.tables[seq_id] = table + suffix
        return True

    # -- decoding ----------------------------------------------------------

    def append_slot(self, seq_id: int, num_tokens: int) -> Optional[Tuple[int, int]]:
        table = self.tables[seq_id]
        if self.blocks_for(num_tokens) > len(table):
            table.append(self.gpu.allocate())  # clean: appended to the sequence's table
            return None
        last = table[-1]
        if last.ref_count == 1:
            return None
        fresh = self.gpu.allocate()  # clean: near miss, takes the place of the shared block in the table
        table[-1] = fresh
        self.gpu.free(last)
        return last.number, fresh.number

    def fork(self, parent_id: int, child_id: int) -> None:
        self.free_seq(child_id)
        self.tables[child_id] = [
            self.gpu.share(b)  # clean: near miss, earlier table of the child was freed first
            for b in self.tables[parent_id]
        ]

    def reserve_lookahead(self, seq_id: int, k: int) -> List[int]:
        blocks = []
        for _ in range(self.blocks_for(k)):
            blocks.append(self.gpu.allocate())  # leak: the next step's reservation overwrites one that was never committed
        self.lookahead[seq_id] = blocks
        return [b.number for b in blocks]

    def commit_lookahead(self, seq_id: int, accepted: int) -> None:
        if accepted == 0:
            return
        blocks = self.lookahead.pop(seq_id, [])
        keep = self.blocks_for(accepted)
        self.tables[seq_id].extend(blocks[:keep])
        for block in blocks[keep:]:
            self.gpu.free(block)

    # -- swapping ----------------------------------------------------------

    def swap_out(self, seq_id: int) -> bool:
        table = self.tables[seq_id]
        if self.cpu.num_free() < len(table):
            return False
        host_table: List[PhysicalBlock] = []
        for block in table:
            host = self.cpu.allocate()  # clean: moved into self.swapped, swap_in() and free_seq() release it
            self.copy_fn(block, host)
            host_table.append(host)
        self.swapped[seq_id] = host_table
        for block in self.tables.pop(seq_id):
            self.gpu.free(block)
        return True

    def swap_in(self, seq_id: int) -> bool:
        fresh: List[PhysicalBlock] = []
        host_table = self.swapped[seq_id]
        try:
            for host in host_table:
                fresh.append(self.gpu.allocate())  # clean: near miss, the handler frees what was taken
                self.copy_fn(host, fresh[-1])
        except NoFreeBlocks:
            while fresh:
                self.gpu.free(fresh.pop())
            return False
        self.tables[seq_id] = fresh
        for host in self.swapped.pop(seq_id):
            self.cpu.free(host)
        return True

    def stage_host(self, block: PhysicalBlock, attempts: int = 3) -> Optional[PhysicalBlock]:
        host = None
        for _ in range(attempts):
            host = self.cpu.allocate()  # leak: a failed copy rebinds host on the next attempt
            if self.copy_fn(block, host):
                return host
        if host is not None:
            self.cpu.free(host)
        return None

    def checkpoint_tail(self, seq_id: int) -> bool:
        tail = self.tables[seq_id][-1]
        host = self.stage_host(tail)  # clean: None-checked and put in self.tail_copies, whose old entry is freed
        if host is None:
            return False
        stale = self.tail_copies.pop(seq_id, None)
        if stale is not None:
            self.cpu.free(stale)
        self.tail_copies[seq_id] = host
        return True

    def compact(self, seq_id: int) -> int:
        """Move the table's blocks to low block numbers; returns how many moved."""
        moved = 0
        table = self.tables[seq_id]
        for idx, block in enumerate(table):
            if block.ref_count > 1 or not self.gpu.num_free():
                continue
            target = self.gpu.allocate()  # leak: not freed when its number is no better than the old one
            if target.number >= block.number:
                continue
            self.copy_fn(block, target)
            table[idx] = target
            self.gpu.free(block)
            moved += 1
        return moved

    def free_seq(self, seq_id: int) -> None:
        for block in self.tables.pop(seq_id, ()):
            self.gpu.free(block)
        for host in self.swapped.pop(seq_id, ()):
            self.cpu.free(host)
        for block in self.lookahead.pop(seq_id, ()):
            self.gpu.free(block)
        tail = self.tail_copies.pop(seq_id, None)
        if tail is not None:
            self.cpu.free(tail)
