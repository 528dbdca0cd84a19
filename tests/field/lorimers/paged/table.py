from __future__ import annotations

from typing import Dict, List, Optional, Sequence

from .allocator import BlockAllocator, KVBlock


class BlockTable:
    """Logical to physical blocks of one sequence."""

    def __init__(self, alloc: BlockAllocator, block_size: int) -> None:
        self.alloc = alloc
        self.block_size = block_size
        self.blocks: List[KVBlock] = []
        self.tail_used = 0

    def reserve(self, num_tokens: int) -> bool:
        need = -(-num_tokens // self.block_size) - len(self.blocks)
        if need <= 0:
            return True
        fresh = self.alloc.allocate_many(need)  # clean: moved into self.blocks, freed by release
        if fresh is None:
            return False
        self.blocks.extend(fresh)
        return True

    def match_prefix(self, digests: Sequence[int]) -> int:
        hits = 0
        for d in digests:
            block = self.alloc.lookup(d)  # clean: appended to self.blocks, freed by release
            if block is None:
                break
            self.blocks.append(block)
            hits += 1
        return hits

    def prefix_length(self, digests: Sequence[int]) -> int:
        n = 0
        for d in digests:
            if self.alloc.lookup(d) is None:  # leak: the looked-up reference is only compared
                break
            n += 1
        return n * self.block_size

    def copy_on_write(self, slot: int) -> bool:
        old = self.blocks[slot]
        if old.refs == 1:
            return True
        fresh = self.alloc.allocate()  # clean: replaces the shared block, which is freed
        if fresh is None:
            return False
        self.blocks[slot] = fresh
        self.alloc.free(old)
        return True

    def privatize(self, slot: int) -> bool:
        """Give the sequence its own copy of a block before a tree rewrite."""
        fresh = self.alloc.allocate()  # leak: an unshared slot returns with the fresh block unplaced
        if fresh is None:
            return False
        if self.blocks[slot].refs == 1:
            return True
        shared, self.blocks[slot] = self.blocks[slot], fresh
        self.alloc.free(shared)
        return True

    def truncate(self, num_tokens: int) -> None:
        keep = -(-num_tokens // self.block_size)
        while len(self.blocks) > keep:
            self.alloc.free(self.blocks.pop())

    def fork(self) -> "BlockTable":
        child = BlockTable(self.alloc, self.block_size)
        child.blocks = [self.alloc.share(b) for b in self.blocks]  # clean: the child table owns the references
        child.tail_used = self.tail_used
        return child

    def release(self) -> None:
        self.alloc.free_many(self.blocks)


class SwapMap:
    """Host blocks that stand in for device blocks of preempted sequences."""

    def __init__(self, host: BlockAllocator) -> None:
        self.host = host
        self._map: Dict[str, List[KVBlock]] = {}

    def swap_out(self, req_id: str, table: BlockTable) -> bool:
        landing = self.host.allocate_many(len(table.blocks))  # clean: kept in the map, freed by swap_in or forget
        if landing is None:
            return False
        self._map[req_id] = landing
        table.release()
        return True

    def swap_in(self, req_id: str, table: BlockTable) -> bool:
        landing = self._map.get(req_id)
        if landing is None:
            return False
        fresh = table.alloc.allocate_many(len(landing))  # clean: the table owns the blocks
        if fresh is None:
            return False
        table.blocks = fresh
        del self._map[req_id]
        self.host.free_many(landing)
        return True

    def forget(self, req_id: str) -> None:
        landing: Optional[List[KVBlock]] = self._map.pop(req_id, None)
        if landing:
            self.host.free_many(landing)
