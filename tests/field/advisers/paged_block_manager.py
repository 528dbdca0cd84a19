"""Paged KV block manager with prefix sharing, swapping and speculative lookahead."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Iterable


class PhysicalBlock:
    __slots__ = ("block_id", "ref_count", "block_hash")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: int | None = None


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.blocks = [PhysicalBlock(i) for i in range(num_blocks)]
        self.free_list: deque[PhysicalBlock] = deque(self.blocks)
        self.cached: dict[int, PhysicalBlock] = {}

    def get_new_block(self) -> PhysicalBlock | None:
        if not self.free_list:
            return None
        block = self.free_list.popleft()
        if block.block_hash is not None:
            self.cached.pop(block.block_hash, None)
            block.block_hash = None
        block.ref_count = 1
        return block

    def set_hash(self, block: PhysicalBlock, block_hash: int) -> None:
        if block.block_hash is None and block_hash not in self.cached:
            block.block_hash = block_hash
            self.cached[block_hash] = block

    def lookup(self, block_hash: int) -> PhysicalBlock | None:
        return self.cached.get(block_hash)

    def touch(self, block: PhysicalBlock) -> None:
        if block.ref_count == 0:
            self.free_list.remove(block)
        block.ref_count += 1

    def free_block(self, block: PhysicalBlock) -> None:
        block.ref_count -= 1
        if block.ref_count == 0:
            self.free_list.append(block)


@dataclass
class Sequence:
    seq_id: int
    token_ids: list[int]
    block_size: int = 16
    encoder_len: int = 0
    hashes: list[int] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return -(-len(self.token_ids) // self.block_size)


class BlockSpaceManager:
    def __init__(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self.gpu = BlockPool(num_gpu_blocks)
        self.cpu = BlockPool(num_cpu_blocks)
        self.tables: dict[int, list[PhysicalBlock]] = {}
        self.cross_tables: dict[int, list[PhysicalBlock]] = {}
        self.lookahead: dict[int, list[PhysicalBlock]] = {}
        self.pinned: dict[str, list[PhysicalBlock]] = {}
        self.swapped: set[int] = set()
        self.null_block = self.gpu.get_new_block()  # clean: padding block, kept by the manager for its whole life

    def allocate(self, seq: Sequence) -> bool:
        table: list[PhysicalBlock] = []
        for block_hash in seq.hashes:
            hit = self.gpu.lookup(block_hash)
            if hit is None:
                break
            self.gpu.touch(hit)  # leak: the out-of-blocks return below frees only table[num_cached:], the touched hits keep their reference
            table.append(hit)
        num_cached = len(table)
        while len(table) < seq.num_blocks:
            block = self.gpu.get_new_block()  # clean: near miss, kept in the table or rolled back with table[num_cached:]
            if block is None:
                for fresh in table[num_cached:]:
                    self.gpu.free_block(fresh)
                return False
            table.append(block)
        self.tables[seq.seq_id] = table
        return True

    def mark_computed(self, seq: Sequence) -> None:
        for block_hash, block in zip(seq.hashes, self.tables[seq.seq_id]):
            self.gpu.set_hash(block, block_hash)

    def allocate_cross(self, seq: Sequence) -> bool:
        need = -(-seq.encoder_len // seq.block_size)
        if need > len(self.gpu.free_list):
            return False
        blocks = []
        for _ in range(need):
            blocks.append(self.gpu.get_new_block())  # clean: into cross_tables, which free() empties
        self.cross_tables[seq.seq_id] = blocks
        return True

    def append_slot(self, seq: Sequence) -> tuple[bool, tuple[int, int] | None]:
        table = self.tables[seq.seq_id]
        if len(table) < seq.num_blocks:
            block = self.gpu.get_new_block()  # clean: appended to the sequence's table
            if block is None:
                return False, None
            table.append(block)
            return True, None
        last = table[-1]
        if last.ref_count == 1:
            return True, None
        fresh = self.gpu.get_new_block()  # clean: near miss, takes the place of the shared block, whose reference is dropped
        if fresh is None:
            return False, None
        table[-1] = fresh
        self.gpu.free_block(last)
        return True, (last.block_id, fresh.block_id)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        src = self.tables[parent.seq_id]
        for block in src:
            self.gpu.touch(block)  # clean: one reference for each entry of the child's table
        self.tables[child.seq_id] = src.copy()

    def reserve_lookahead(self, seq: Sequence, k: int) -> bool:
        if k > len(self.gpu.free_list):
            return False
        spare = []
        for _ in range(k):
            spare.append(self.gpu.get_new_block())  # leak: commit_lookahead moves the accepted ones and drops the others
        self.lookahead[seq.seq_id] = spare
        return True

    def commit_lookahead(self, seq: Sequence, accepted: int) -> None:
        spare = self.lookahead.pop(seq.seq_id, [])
        self.tables[seq.seq_id].extend(spare[:accepted])

    def swap_out(self, seq: Sequence) -> dict[int, int] | None:
        mapping: dict[int, int] = {}
        host_table = []
        for block in self.tables[seq.seq_id]:
            host = self.cpu.get_new_block()  # leak: when the host pool runs dry midway, those already in host_table are dropped
            if host is None:
                return None
            host_table.append(host)
            mapping[block.block_id] = host.block_id
        for block in self.tables[seq.seq_id]:
            self.gpu.free_block(block)
        self.tables[seq.seq_id] = host_table
        self.swapped.add(seq.seq_id)
        return mapping

    def swap_in(self, seq: Sequence) -> dict[int, int] | None:
        host_table = self.tables[seq.seq_id]
        gpu_table: list[PhysicalBlock] = []
        for _ in host_table:
            block = self.gpu.get_new_block()  # clean: near miss, all of gpu_table is freed when one is missing
            if block is None:
                self._free_all(self.gpu, gpu_table)
                return None
            gpu_table.append(block)
        self._free_all(self.cpu, host_table)
        self.tables[seq.seq_id] = gpu_table
        self.swapped.discard(seq.seq_id)
        return {h.block_id: g.block_id for h, g in zip(host_table, gpu_table)}

    def pin_prefix(self, name: str, hashes: Iterable[int]) -> int:
        held = []
        for block_hash in hashes:
            block = self.gpu.lookup(block_hash)
            if block is None:
                break
            self.gpu.touch(block)  # leak: pinning the same name again overwrites the earlier list
            held.append(block)
        self.pinned[name] = held
        return len(held)

    def unpin_prefix(self, name: str) -> None:
        self._free_all(self.gpu, self.pinned.pop(name, []))

    def free(self, seq: Sequence) -> None:
        pool = self.cpu if seq.seq_id in self.swapped else self.gpu
        self._free_all(pool, self.tables.pop(seq.seq_id, []))
        self._free_all(self.gpu, self.cross_tables.pop(seq.seq_id, []))
        self._free_all(self.gpu, self.lookahead.pop(seq.seq_id, []))
        self.swapped.discard(seq.seq_id)

    @staticmethod
    def _free_all(pool: BlockPool, blocks: Iterable[PhysicalBlock]) -> None:
        for block in blocks:
            pool.free_block(block)
