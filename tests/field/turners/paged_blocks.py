"""Paged KV block manager: physical blocks, per-sequence tables, fork, swap and copy-on-write."""
from __future__ import annotations

from collections import deque
from typing import Deque, Dict, List, Optional, Tuple


class Block:
    __slots__ = ("block_id", "device", "ref")

    def __init__(self, block_id: int, device: str) -> None:
        self.block_id = block_id
        self.device = device
        self.ref = 0

    def __repr__(self) -> str:
        return f"Block({self.device}:{self.block_id}, ref={self.ref})"


class BlockAllocator:
    def __init__(self, device: str, num_blocks: int) -> None:
        self.device = device
        self.num_blocks = num_blocks
        self._free: Deque[Block] = deque(Block(i, device) for i in range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[Block]:
        if not self._free:
            return None
        block = self._free.popleft()
        block.ref = 1
        return block

    def incref(self, block: Block) -> Block:
        assert block.ref > 0
        block.ref += 1
        return block

    def free(self, block: Block) -> None:
        assert block.ref > 0, f"double free of {block}"
        block.ref -= 1
        if block.ref == 0:
            self._free.append(block)


class BlockManager:
    def __init__(self, gpu_blocks: int, cpu_blocks: int, block_size: int = 16,
                 allow_partial_lookahead: bool = False) -> None:
        self.gpu = BlockAllocator("cuda", gpu_blocks)
        self.cpu = BlockAllocator("cpu", cpu_blocks)
        self.block_size = block_size
        self.allow_partial_lookahead = allow_partial_lookahead
        self.tables: Dict[int, List[Block]] = {}
        self.swapped: Dict[int, List[Block]] = {}
        self._pinned: Dict[str, List[Block]] = {}
        self.pending_copies: List[Tuple[int, int]] = []

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate_prompt(self, seq_id: int, num_tokens: int) -> bool:
        if seq_id in self.tables:
            return True
        table: List[Block] = []
        for _ in range(self._blocks_for(num_tokens)):
            block = self.gpu.allocate()  # leak: the blocks already in the local table are dropped when the pool runs dry midway
            if block is None:
                return False
            table.append(block)
        self.tables[seq_id] = table
        return True

    def allocate_group(self, seq_ids: List[int], num_tokens: int) -> bool:
        need = self._blocks_for(num_tokens)
        staged: Dict[int, List[Block]] = {}
        for seq_id in seq_ids:
            if seq_id in self.tables:
                continue
            staged[seq_id] = []
            for _ in range(need):
                block = self.gpu.allocate()  # clean: near miss, every staged table is rolled back when one block is missing
                if block is None:
                    for table in staged.values():
                        self._free_table(table)
                    return False
                staged[seq_id].append(block)
        self.tables.update(staged)
        return True

    def append_slot(self, seq_id: int, position: int) -> Optional[Tuple[int, int]]:
        """Make room for one token; returns (block_id, offset)."""
        table = self.tables[seq_id]
        if position // self.block_size >= len(table):
            block = self.gpu.allocate()  # clean: None is handled, otherwise it joins the sequence's table
            if block is None:
                return None
            table.append(block)
        last = table[-1]
        if last.ref > 1:
            fresh = self.gpu.allocate()  # clean: near miss, takes the table's last place and the shared block is freed
            if fresh is None:
                return None
            self.pending_copies.append((last.block_id, fresh.block_id))
            table[-1] = fresh
            self.gpu.free(last)
        return table[-1].block_id, position % self.block_size

    def reserve_lookahead(self, seq_id: int, num_slots: int) -> int:
        extra: List[Block] = []
        while len(extra) < num_slots:
            block = self.gpu.allocate()  # leak: a short reservation returns 0 and forgets the blocks in extra
            if block is None:
                break
            extra.append(block)
        if len(extra) < num_slots and not self.allow_partial_lookahead:
            return 0
        self.tables[seq_id].extend(extra)
        return len(extra)

    def fork(self, parent: int, children: List[int]) -> None:
        src = self.tables[parent]
        for child in children:
            if child in self.tables:
                self.release(child)
            shared = [self.gpu.incref(block) for block in src]  # clean: stored in the child's table, an older table is released first
            self.tables[child] = shared

    def reassign_beams(self, parents: Dict[int, int]) -> None:
        """Point every beam at the table of the beam it was expanded from."""
        new_tables: Dict[int, List[Block]] = {}
        for seq_id, parent in parents.items():
            new_tables[seq_id] = [self.gpu.incref(b) for b in self.tables[parent]]  # clean: near miss, old tables are freed before the update
        for seq_id in parents:
            self._free_table(self.tables[seq_id])
        self.tables.update(new_tables)

    def pin_prefix(self, name: str, seq_id: int, num_tokens: int) -> None:
        full = num_tokens // self.block_size
        held = [self.gpu.incref(b) for b in self.tables[seq_id][:full]]  # leak: pinning a name again overwrites the blocks held under it
        self._pinned[name] = held

    def unpin_prefix(self, name: str) -> None:
        self._free_table(self._pinned.pop(name, []))

    def swap_out(self, seq_id: int) -> Optional[List[Tuple[int, int]]]:
        host_table: List[Block] = []
        mapping: List[Tuple[int, int]] = []
        for block in self.tables[seq_id]:
            host = self.cpu.allocate()  # leak: swap_in pops the host table and returns None without it when the GPU is full
            if host is None:
                for taken in host_table:
                    self.cpu.free(taken)
                return None
            host_table.append(host)
            mapping.append((block.block_id, host.block_id))
        self._free_table(self.tables.pop(seq_id))
        self.swapped[seq_id] = host_table
        return mapping

    def swap_in(self, seq_id: int) -> Optional[List[Tuple[int, int]]]:
        host_table = self.swapped.pop(seq_id)
        table: List[Block] = []
        for _ in host_table:
            block = self.gpu.allocate()  # clean: rolled back when short, else in the sequence's table
            if block is None:
                self._free_table(table)
                return None
            table.append(block)
        mapping = [(h.block_id, b.block_id) for h, b in zip(host_table, table)]
        for host in host_table:
            self.cpu.free(host)
        self.tables[seq_id] = table
        return mapping

    def has_headroom(self) -> bool:
        probe = self.gpu.allocate()  # clean: near miss, the probe is freed at once
        if probe is None:
            return False
        self.gpu.free(probe)
        return True

    def release(self, seq_id: int) -> None:
        table = self.tables.pop(seq_id, None)
        if table is not None:
            self._free_table(table)
        for host in self.swapped.pop(seq_id, ()):
            self.cpu.free(host)

    def _free_table(self, table: List[Block]) -> None:
        for block in table:
            self.gpu.free(block)


if __name__ == "__main__":
    mgr = BlockManager(8, 4)
    assert mgr.allocate_prompt(1, 40)
    mgr.fork(1, [2])
    mgr.append_slot(2, 40)
    mgr.reassign_beams({1: 2, 2: 2})
    mgr.release(1)
    mgr.swap_out(2)
    mgr.swap_in(2)
    mgr.release(2)
    assert mgr.has_headroom() and mgr.gpu.num_free == 8 and mgr.cpu.num_free == 4
