"""Block tables for paged attention with copy-on-write and host swap."""
from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Optional


class NoFreeBlocks(Exception):
    pass


class Block:
    __slots__ = ("bid", "ref", "device")

    def __init__(self, bid: int, device: str):
        self.bid = bid
        self.ref = 0
        self.device = device


class BlockAllocator:
    """Reference counted blocks of one device."""

    def __init__(self, device: str, num_blocks: int, watermark: float = 0.01):
        self.device = device
        self._free: deque[Block] = deque(Block(i, device) for i in range(num_blocks))
        self.watermark_blocks = int(num_blocks * watermark)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc(self) -> Block:
        if not self._free:
            raise NoFreeBlocks(self.device)
        blk = self._free.popleft()  # clean: returned with one reference
        blk.ref = 1
        return blk

    def try_alloc(self) -> Optional[Block]:
        return self.alloc() if self._free else None  # clean: returned to the caller

    def alloc_aligned(self, align: int) -> Block:
        """Block whose id is a multiple of align, for the 2MB page path."""
        while self._free:
            blk = self._free.popleft()  # leak: misaligned candidates are not put back before the next pop
            if blk.bid % align == 0:
                blk.ref = 1
                return blk
        raise NoFreeBlocks(f"{self.device}: none aligned to {align}")

    def incref(self, blk: Block) -> Block:
        blk.ref += 1
        return blk

    def free(self, blk: Block) -> None:
        blk.ref -= 1
        if blk.ref == 0:
            self._free.append(blk)


@dataclass
class Seq:
    seq_id: int
    length: int = 0
    table: list[Block] = field(default_factory=list)
    swapped: bool = False


@dataclass
class BlockTableManager:
    gpu: BlockAllocator
    cpu: BlockAllocator
    block_size: int = 16
    tables: dict[int, list[Block]] = field(default_factory=dict)
    # cross attention tables of encoder-decoder models, one per group
    cross: dict[int, list[Block]] = field(default_factory=dict)

    def blocks_for(self, tokens: int) -> int:
        return math.ceil(tokens / self.block_size)

    def can_allocate(self, tokens: int) -> bool:
        return self.gpu.num_free - self.blocks_for(tokens) >= self.gpu.watermark_blocks

    def allocate(self, seq: Seq) -> bool:
        need = self.blocks_for(seq.length)
        if not self.can_allocate(seq.length):
            return False
        seq.table = [self.gpu.alloc() for _ in range(need)]  # clean: near miss, stored in the table, count checked above
        self.tables[seq.seq_id] = seq.table
        return True

    def allocate_enc_dec(self, seq: Seq, enc_tokens: int) -> bool:
        dec: list[Block] = []
        try:
            for _ in range(self.blocks_for(seq.length)):
                dec.append(self.gpu.alloc())  # clean: freed in the handler or stored in tables
        except NoFreeBlocks:
            for blk in dec:
                self.gpu.free(blk)
            return False
        enc: list[Block] = []
        try:
            for _ in range(self.blocks_for(enc_tokens)):
                enc.append(self.gpu.alloc())  # leak: encoder blocks got so far are not freed by the handler
        except NoFreeBlocks:
            for blk in dec:
                self.gpu.free(blk)
            return False
        self.tables[seq.seq_id] = seq.table = dec
        self.cross[seq.seq_id] = enc
        return True

    def append_slot(self, seq: Seq) -> Optional[tuple[int, int]]:
        """Returns a (src, dst) copy when the last block was shared."""
        table = seq.table
        if seq.length % self.block_size == 0:
            table.append(self.gpu.alloc())  # clean: appended to the sequence's table
            return None
        last = table[-1]
        if last.ref == 1:
            return None
        fresh = self.gpu.alloc()  # clean: replaces the shared last block, whose reference is dropped
        table[-1] = fresh
        self.gpu.free(last)
        return last.bid, fresh.bid

    def fork_prefix(self, parent: Seq, child: Seq, tokens: int) -> bool:
        shared = []
        for blk in parent.table[: tokens // self.block_size]:
            shared.append(self.gpu.incref(blk))  # leak: references stay when there is no tail block
        tail = self.gpu.try_alloc()  # clean: put at the end of the child's table
        if tail is None:
            return False
        child.table = shared + [tail]
        child.length = tokens
        self.tables[child.seq_id] = child.table
        return True

    def release(self, seq: Seq) -> None:
        pool = self.cpu if seq.swapped else self.gpu
        for blk in self.tables.pop(seq.seq_id, ()):
            pool.free(blk)
        for blk in self.cross.pop(seq.seq_id, ()):
            self.gpu.free(blk)
        seq.table = []

    def swap_out(self, seq: Seq) -> Optional[list[tuple[int, int]]]:
        mapping: list[tuple[int, int]] = []
        host: list[Block] = []
        for blk in seq.table:
            dst = self.cpu.try_alloc()  # clean: near miss, collected in host and freed when the tier is full
            if dst is None:
                for h in host:
                    self.cpu.free(h)
                return None
            host.append(dst)
            mapping.append((blk.bid, dst.bid))
        for blk in seq.table:
            self.gpu.free(blk)
        seq.table = host
        self.tables[seq.seq_id] = host
        seq.swapped = True
        return mapping

    def swap_in(self, seq: Seq) -> list[tuple[int, int]]:
        mapping: list[tuple[int, int]] = []
        fresh: list[Block] = []
        for blk in seq.table:
            dst = self.gpu.try_alloc()  # leak: blocks already in fresh are dropped by the early return
            if dst is None:
                return []
            fresh.append(dst)
            mapping.append((blk.bid, dst.bid))
        for old in seq.table:
            self.cpu.free(old)
        seq.table = fresh
        self.tables[seq.seq_id] = fresh
        seq.swapped = False
        return mapping

    def truncate(self, seq: Seq, length: int) -> None:
        keep = self.blocks_for(length)
        while len(seq.table) > keep:
            self.gpu.free(seq.table.pop())
        seq.length = length


class ReservationHeap:
    """Blocks promised to high priority sequences, lowest deadline first."""

    def __init__(self, alloc: BlockAllocator):
        self.alloc = alloc
        self.heap: list[tuple[float, int, Block]] = []
        self._tick = 0

    def reserve(self, deadline: float, count: int) -> int:
        got = 0
        while got < count:
            blk = self.alloc.try_alloc()  # clean: pushed on the heap, which claim and expire empty
            if blk is None:
                break
            self._tick += 1
            heapq.heappush(self.heap, (deadline, self._tick, blk))
            got += 1
        return got

    def claim(self, now: float) -> Optional[Block]:
        while self.heap:
            deadline, _, blk = heapq.heappop(self.heap)  # leak: expired blocks are skipped without being freed
            if deadline < now:
                continue
            return blk
        return None

    def expire(self, now: float) -> int:
        n = 0
        while self.heap and self.heap[0][0] < now:
            _, _, blk = heapq.heappop(self.heap)  # clean: freed right away
            self.alloc.free(blk)
            n += 1
        return n
