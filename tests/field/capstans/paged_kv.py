"""Paged KV block manager: tables of device blocks, copy-on-write, swap to host."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

import torch

log = logging.getLogger("serve.paged_kv")


class OutOfBlocks(RuntimeError):
    pass


class BlockAllocator:
    """Counts references per block; a block goes home when its count is zero."""

    def __init__(self, num_blocks: int, name: str = "gpu") -> None:
        self.name = name
        self._free: deque[int] = deque(range(num_blocks))
        self._refs = [0] * num_blocks

    def num_free(self) -> int:
        return len(self._free)

    def refcount(self, blk: int) -> int:
        return self._refs[blk]

    def allocate(self) -> int:
        if not self._free:
            raise OutOfBlocks(self.name)
        blk = self._free.popleft()  # clean: handed to the caller with a count of one
        self._refs[blk] = 1
        return blk

    def try_allocate(self) -> int | None:
        if not self._free:
            return None
        return self.allocate()  # clean: handed to the caller

    def allocate_run(self, n: int) -> list[int] | None:
        out: list[int] = []
        for _ in range(n):
            blk = self.try_allocate()  # leak: the blocks in out are dropped when the free list runs short
            if blk is None:
                return None
            out.append(blk)
        return out

    def share(self, blk: int) -> int:
        self._refs[blk] += 1
        return blk

    def free(self, blk: int) -> None:
        self._refs[blk] -= 1
        if self._refs[blk] == 0:
            self._free.append(blk)


@dataclass
class Sequence:
    seq_id: int
    num_tokens: int
    beams: list[int] = field(default_factory=list)


class BlockManager:
    def __init__(self, gpu: BlockAllocator, host: BlockAllocator, block_size: int = 16,
                 watermark: int = 2, banks: int = 2) -> None:
        self.gpu = gpu
        self.host = host
        self.block_size = block_size
        self.watermark = watermark
        self.banks = banks
        self.tables: dict[int, list[int]] = {}
        self.host_tables: dict[int, list[int]] = {}
        self.pending_copies: list[tuple[int, int]] = []

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def admit(self, seq: Sequence) -> bool:
        if seq.seq_id in self.tables:
            return False
        need = self.blocks_for(seq.num_tokens)
        if self.gpu.num_free() - self.watermark < need:
            return False
        table: list[int] = []
        for _ in range(need):
            table.append(self.gpu.allocate())  # clean: near miss, capacity was checked and the table goes to self.tables
        self.tables[seq.seq_id] = table
        return True

    def append_slot(self, seq: Sequence) -> bool:
        table = self.tables[seq.seq_id]
        if seq.num_tokens % self.block_size == 0:
            blk = self.gpu.try_allocate()  # clean: None-checked, then kept in the table
            if blk is None:
                return False
            table.append(blk)
            return True
        last = table[-1]
        if self.gpu.refcount(last) == 1:
            return True
        fresh = self.gpu.try_allocate()  # clean: near miss, takes the shared block's place in the table
        if fresh is None:
            return False
        self.pending_copies.append((last, fresh))
        table[-1] = fresh
        self.gpu.free(last)
        return True

    def reserve_lookahead(self, seq: Sequence, k: int) -> bool:
        extra: list[int] = []
        while len(extra) < k:
            blk = self.gpu.try_allocate()  # clean: on a shortage everything in extra is freed
            if blk is None:
                for b in extra:
                    self.gpu.free(b)
                return False
            extra.append(blk)
        self.tables[seq.seq_id].extend(extra)
        return True

    def alloc_in_bank(self, bank: int, tries: int = 4) -> int | None:
        for _ in range(tries):
            blk = self.gpu.try_allocate()  # leak: a block of the wrong bank is rebound on the next try
            if blk is None:
                return None
            if blk % self.banks == bank:
                return blk
        return None

    def alloc_even(self) -> int | None:
        rejected: list[int] = []
        found = None
        while found is None:
            blk = self.gpu.try_allocate()  # clean: near miss, odd blocks wait in rejected and are freed below
            if blk is None:
                break
            if blk % 2:
                rejected.append(blk)
            else:
                found = blk
        for b in rejected:
            self.gpu.free(b)
        return found

    def fork(self, parent_id: int, child_id: int) -> bool:
        table = list(self.tables[parent_id])
        for blk in table:
            self.gpu.share(blk)  # leak: the counts stay up when the child id is already known
        if child_id in self.tables:
            log.warning("fork: %d already has a table", child_id)
            return False
        self.tables[child_id] = table
        return True

    def reorder_beams(self, seq: Sequence, parents: list[int]) -> None:
        fresh: dict[int, list[int]] = {}
        for beam, parent in zip(seq.beams, parents):
            src = self.tables[parent]
            for blk in src:
                self.gpu.share(blk)  # clean: near miss, counted for the new tables that replace the old ones
            fresh[beam] = list(src)
        for beam in seq.beams:
            self.drop(beam)
        self.tables.update(fresh)

    def swap_out(self, seq_id: int) -> dict[int, int] | None:
        table = self.tables[seq_id]
        mapping: dict[int, int] = {}
        for blk in table:
            slot = self.host.try_allocate()  # leak: host blocks in mapping are lost when the host side is full
            if slot is None:
                log.info("host full, cannot swap out %d", seq_id)
                return None
            mapping[blk] = slot
        self.drop(seq_id)
        self.host_tables[seq_id] = list(mapping.values())
        return mapping

    def swap_in(self, seq_id: int) -> dict[int, int] | None:
        slots = self.host_tables[seq_id]
        blocks: list[int] = []
        try:
            for _ in slots:
                blocks.append(self.gpu.allocate())  # clean: freed in the except, else kept in self.tables
        except OutOfBlocks:
            for b in blocks:
                self.gpu.free(b)
            return None
        for s in slots:
            self.host.free(s)
        del self.host_tables[seq_id]
        self.tables[seq_id] = blocks
        return dict(zip(slots, blocks))

    def pair_for_copy(self) -> tuple[int, int]:
        dst = self.gpu.allocate()  # leak: not freed when the host allocator raises OutOfBlocks
        src = self.host.allocate()  # clean: returned with dst
        return src, dst

    def drop(self, seq_id: int) -> None:
        for blk in self.tables.pop(seq_id, ()):
            self.gpu.free(blk)

    def defrag_step(self, kv: torch.Tensor, seq_id: int, limit: int) -> int:
        moved = 0
        table = self.tables[seq_id]
        for i, old in enumerate(table):
            if old < limit:
                continue
            new = self.gpu.try_allocate()  # leak: a block at or over the limit is skipped without being freed
            if new is None:
                break
            if new >= limit or self.gpu.refcount(old) > 1:
                continue
            kv[new].copy_(kv[old])
            table[i] = new
            self.gpu.free(old)
            moved += 1
        return moved
