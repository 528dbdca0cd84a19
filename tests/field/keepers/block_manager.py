"""Paged KV blocks: tables per sequence, forking, copy on write, swapping to host."""
from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple


class OutOfBlocks(Exception):
    pass


class BlockAllocator:
    def __init__(self, num_blocks: int) -> None:
        self._free: List[int] = list(range(num_blocks))
        self._refs: List[int] = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        if not self._free:
            raise OutOfBlocks()
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def incref(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def free(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)

    def is_shared(self, block: int) -> bool:
        return self._refs[block] > 1


class BlockManager:
    def __init__(self, device_blocks: int, host_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.device = BlockAllocator(device_blocks)
        self.host = BlockAllocator(host_blocks)
        self.tables: Dict[int, List[int]] = {}
        self.host_tables: Dict[int, List[int]] = {}
        self.lookahead: Dict[int, List[int]] = {}

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self, seq_id: int, tokens: int) -> bool:
        need = self.blocks_for(tokens)
        if self.device.num_free < need:
            return False
        self.tables[seq_id] = [self.device.allocate() for _ in range(need)]  # clean: near miss, counted first, freed with the table
        return True

    def allocate_greedy(self, seq_id: int, tokens: int) -> bool:
        table: List[int] = []
        try:
            for _ in range(self.blocks_for(tokens)):
                table.append(self.device.allocate())  # leak: what was gathered before OutOfBlocks is dropped with the list
        except OutOfBlocks:
            return False
        self.tables[seq_id] = table
        return True

    def append_slot(self, seq_id: int, tokens: int) -> Optional[Tuple[int, int]]:
        table = self.tables[seq_id]
        if len(table) < self.blocks_for(tokens):
            table.append(self.device.allocate())  # clean: near miss, in the sequence's table
            return None
        last = table[-1]
        if not self.device.is_shared(last):
            return None
        fresh = self.device.allocate()  # clean: near miss, replaces the shared block whose reference is freed
        table[-1] = fresh
        self.device.free(last)
        return last, fresh

    def fork(self, parent: int, child: int) -> None:
        self.tables[child] = [self.device.incref(b) for b in self.tables[parent]]  # clean: near miss, the child's table frees them

    def beam_reorder(self, seq_ids: List[int], parents: List[int]) -> None:
        new: Dict[int, List[int]] = {}
        for seq_id, parent in zip(seq_ids, parents):
            new[seq_id] = [self.device.incref(b) for b in self.tables[parent]]  # clean: near miss, the old tables are freed before the update
        for seq_id in seq_ids:
            self.free(seq_id)
        self.tables.update(new)

    def adopt(self, seq_id: int, parent: int, shared_tokens: int) -> None:
        keep = self.tables[parent][:self.blocks_for(shared_tokens)]
        for block in self.tables[parent]:
            self.device.incref(block)  # leak: counts up every parent block, but the table keeps only the shared prefix
        self.tables[seq_id] = list(keep)

    def make_private(self, seq_id: int) -> List[Tuple[int, int]]:
        copies: List[Tuple[int, int]] = []
        table = self.tables[seq_id]
        for i, block in enumerate(table):
            if not self.device.is_shared(block):
                continue
            try:
                fresh = self.device.allocate()  # clean: near miss, written into the table at once
            except OutOfBlocks:
                break
            table[i] = fresh
            self.device.free(block)
            copies.append((block, fresh))
        return copies

    def swap_out(self, seq_id: int) -> List[Tuple[int, int]]:
        moves: List[Tuple[int, int]] = []
        if self.host.num_free < len(self.tables[seq_id]):
            return moves
        for block in self.tables.pop(seq_id):
            slot = self.host.allocate()  # clean: near miss, collected in the host table, freed by swap_in or free
            moves.append((block, slot))
            self.device.free(block)
        self.host_tables[seq_id] = [slot for _, slot in moves]
        return moves

    def swap_in(self, seq_id: int) -> List[Tuple[int, int]]:
        moves: List[Tuple[int, int]] = []
        slots = self.host_tables[seq_id]
        try:
            for slot in slots:
                moves.append((slot, self.device.allocate()))  # clean: near miss, rolled back in the handler
        except OutOfBlocks:
            for _, block in moves:
                self.device.free(block)
            return []
        self.tables[seq_id] = [block for _, block in moves]
        for slot in self.host_tables.pop(seq_id):
            self.host.free(slot)
        return moves

    def mirror(self, seq_id: int) -> List[Tuple[int, int]]:
        moves: List[Tuple[int, int]] = []
        for block in self.tables[seq_id]:
            if self.host.num_free == 0:
                return []
            moves.append((block, self.host.allocate()))  # leak: returning empty in the middle forgets the host blocks so far
        self.host_tables[seq_id] = [slot for _, slot in moves]
        return moves

    def reserve_lookahead(self, seq_id: int, k: int) -> int:
        extra = self.lookahead.setdefault(seq_id, [])
        while len(extra) < k and self.device.num_free:
            extra.append(self.device.allocate())  # leak: neither free nor accept of fewer tokens returns the lookahead blocks
        return len(extra)

    def accept(self, seq_id: int, accepted: int) -> None:
        extra = self.lookahead.pop(seq_id, [])
        self.tables[seq_id].extend(extra[:self.blocks_for(accepted)])

    def truncate(self, seq_id: int, tokens: int) -> None:
        table = self.tables[seq_id]
        while len(table) > self.blocks_for(tokens):
            self.device.free(table.pop())

    def bench_copy(self, pairs: int) -> int:
        done = 0
        for _ in range(pairs):
            if self.device.num_free < 2:
                break
            src = self.device.allocate()  # clean: freed in each turn
            dst = self.device.allocate()  # leak: only src is freed at the end of the turn
            done += int(src != dst)
            self.device.free(src)
        return done

    def free(self, seq_id: int) -> None:
        for block in self.tables.pop(seq_id, []):
            self.device.free(block)
        for slot in self.host_tables.pop(seq_id, []):
            self.host.free(slot)
