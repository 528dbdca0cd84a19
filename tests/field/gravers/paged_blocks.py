"""Paged KV-cache: block allocator, block tables, copy-on-write forks and swap space."""
from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field


class NoFreeBlocks(RuntimeError):
    pass


@dataclass
class Block:
    device: str
    number: int
    ref_count: int = 0


@dataclass
class Sequence:
    seq_id: int
    token_ids: list[int]
    status: str = "waiting"

    def num_blocks(self, block_size: int) -> int:
        return math.ceil(len(self.token_ids) / block_size)


@dataclass
class CacheStats:
    pruned: int = 0
    cow: int = 0
    moved: int = 0
    digests: dict[int, int] = field(default_factory=dict)


class BlockAllocator:
    """Fixed set of physical blocks on one device, reference counted."""

    def __init__(self, device: str, num_blocks: int):
        self.device = device
        self._free: deque[Block] = deque(Block(device, i) for i in range(num_blocks))

    def allocate(self) -> Block:
        if not self._free:
            raise NoFreeBlocks(self.device)
        block = self._free.popleft()
        block.ref_count = 1
        return block

    def share(self, block: Block) -> Block:
        block.ref_count += 1
        return block

    def free(self, block: Block) -> None:
        block.ref_count -= 1
        if block.ref_count == 0:
            self._free.append(block)

    def num_free(self) -> int:
        return len(self._free)


class PagedCache:
    def __init__(self, gpu_blocks: int, cpu_blocks: int, block_size: int, watermark: float = 0.01):
        self.gpu = BlockAllocator("gpu", gpu_blocks)
        self.cpu = BlockAllocator("cpu", cpu_blocks)
        self.block_size = block_size
        self.reserve = int(gpu_blocks * watermark)
        self.tables: dict[int, list[Block]] = {}
        self.stats = CacheStats()

    # -- admission ---------------------------------------------------------

    def admit(self, seq: Sequence) -> bool:
        need = seq.num_blocks(self.block_size)
        if self.gpu.num_free() < need + self.reserve:
            return False
        table: list[Block] = []
        for _ in range(need):
            table.append(self.gpu.allocate())  # clean: near miss, the table is kept and release frees it
        self.tables[seq.seq_id] = table
        seq.status = "running"
        return True

    def append_slot(self, seq: Sequence) -> tuple[int, int] | None:
        table = self.tables[seq.seq_id]
        if len(table) < seq.num_blocks(self.block_size):
            table.append(self.gpu.allocate())  # clean: joins the table of the sequence
            return None
        tail = table[-1]
        if tail.ref_count == 1:
            return None
        fresh = self.gpu.allocate()  # clean: near miss, takes the place of the tail whose count is dropped
        table[-1] = fresh
        self.gpu.free(tail)
        self.stats.cow += 1
        return tail.number, fresh.number

    # -- forks -------------------------------------------------------------

    def fork(self, parent: Sequence, child: Sequence) -> None:
        shared: list[Block] = []
        for block in self.tables[parent.seq_id]:
            shared.append(self.gpu.share(block))  # clean: the child's table owns the reference
        self.tables[child.seq_id] = shared

    def fork_beam(self, parent: Sequence, child: Sequence, score: float, floor: float) -> bool:
        picked = [self.gpu.share(b) for b in self.tables[parent.seq_id]]  # leak: a pruned beam keeps counts
        if score < floor:
            self.stats.pruned += 1
            return False
        self.tables[child.seq_id] = picked
        return True

    def fork_checked(self, parent: Sequence, child: Sequence, score: float, floor: float) -> bool:
        picked = [self.gpu.share(b) for b in self.tables[parent.seq_id]]  # clean: freed if pruned, else kept
        if score < floor:
            self.stats.pruned += 1
            for block in picked:
                self.gpu.free(block)
            return False
        self.tables[child.seq_id] = picked
        return True

    # -- swapping ----------------------------------------------------------

    def swap_out(self, seq: Sequence) -> dict[int, int]:
        mapping: dict[int, int] = {}
        moved: list[Block] = []
        for block in self.tables[seq.seq_id]:
            host = self.cpu.allocate()  # leak: swap_in overwrites the table and never frees the host blocks
            mapping[block.number] = host.number
            moved.append(host)
            self.gpu.free(block)
        self.tables[seq.seq_id] = moved
        seq.status = "swapped"
        return mapping

    def swap_in(self, seq: Sequence) -> dict[int, int]:
        mapping: dict[int, int] = {}
        resident: list[Block] = []
        for host in self.tables[seq.seq_id]:
            block = self.gpu.allocate()  # clean: stored as the new table
            mapping[host.number] = block.number
            resident.append(block)
        self.tables[seq.seq_id] = resident
        seq.status = "running"
        return mapping

    # -- maintenance -------------------------------------------------------

    def compact(self, seq: Sequence, copies: list[tuple[int, int]]) -> None:
        table = self.tables[seq.seq_id]
        for i, block in enumerate(table):
            target = self.gpu.allocate()  # leak: skipped when the new number is not lower
            if target.number >= block.number:
                continue
            copies.append((block.number, target.number))
            table[i] = target
            self.gpu.free(block)
            self.stats.moved += 1

    def compact_shared_out(self, seq: Sequence, copies: list[tuple[int, int]]) -> None:
        table = self.tables[seq.seq_id]
        for i, block in enumerate(table):
            if block.ref_count > 1:
                continue
            target = self.gpu.allocate()  # clean: near miss, freed on the continue branch
            if target.number >= block.number:
                self.gpu.free(target)
                continue
            copies.append((block.number, target.number))
            table[i] = target
            self.gpu.free(block)

    def borrow_scratch(self) -> Block:
        scratch = self.gpu.allocate()  # clean: handed to the caller
        self.stats.digests.pop(scratch.number, None)
        return scratch

    def digest(self, seq: Sequence) -> int:
        scratch = self.borrow_scratch()  # leak: only the value is returned, the scratch block is dropped
        value = scratch.number
        for block in self.tables[seq.seq_id]:
            value = (value * 1315423911 + block.number) & 0xFFFFFFFF
        self.stats.digests[seq.seq_id] = value
        return value

    def digest_all(self) -> dict[int, int]:
        scratch = self.borrow_scratch()  # clean: freed in finally
        try:
            return {sid: hash((scratch.number, *[b.number for b in t])) for sid, t in self.tables.items()}
        finally:
            self.gpu.free(scratch)

    def measure_headroom(self, limit: int) -> int:
        taken: list[Block] = []
        while len(taken) < limit and self.gpu.num_free() > self.reserve:
            taken.append(self.gpu.allocate())  # clean: every one is freed below
        count = len(taken)
        while taken:
            self.gpu.free(taken.pop())
        return count

    def truncate(self, seq: Sequence, keep: int) -> int:
        table = self.tables[seq.seq_id]
        dropped = 0
        while len(table) > keep:
            self._free_block(table.pop())
            dropped += 1
        return dropped

    def _free_block(self, block: Block) -> None:
        (self.gpu if block.device == "gpu" else self.cpu).free(block)

    def release(self, seq: Sequence) -> None:
        for block in self.tables.pop(seq.seq_id, ()):
            self._free_block(block)
        seq.status = "finished"
