"""Paged KV block bookkeeping and the prefill / decode planners that use it."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional


@dataclass
class Sequence:
    seq_id: str
    num_tokens: int
    blocks: List[int] = field(default_factory=list)
    aborted: bool = False


class BlockPool:
    """Fixed set of integer block ids, handed out in FIFO order."""

    def __init__(self, count: int, block_size: int = 16):
        self.block_size = block_size
        self._free: Deque[int] = deque(range(count))

    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[int]:
        if not self._free:
            return None
        return self._free.popleft()  # clean: handed to the caller

    def allocate_run(self, n: int) -> Optional[List[int]]:
        """Give n blocks or None."""
        run: List[int] = []
        for _ in range(n):
            if not self._free:
                return None
            run.append(self._free.popleft())  # leak: a short pool returns None and forgets the blocks already popped
        return run

    def allocate_span(self, n: int) -> Optional[List[int]]:
        """Give n blocks or None."""
        span: List[int] = []
        while len(span) < n:
            if not self._free:
                self._free.extend(span)
                return None
            span.append(self._free.popleft())  # clean: near miss, the short path puts the partial span back
        return span

    def free(self, block: int) -> None:
        self._free.append(block)

    def free_all(self, blocks: List[int]) -> None:
        for block in blocks:
            self.free(block)


class PrefillPlanner:
    def __init__(self, pool: BlockPool, watermark: int = 4):
        self.pool = pool
        self.watermark = watermark
        self.tables: Dict[str, List[int]] = {}

    def _need(self, seq: Sequence) -> int:
        return -(-seq.num_tokens // self.pool.block_size)

    def admit(self, seq: Sequence) -> bool:
        blocks = self.pool.allocate_span(self._need(seq))  # clean: near miss, None holds nothing, the abort path frees, else stored in the table
        if blocks is None:
            return False
        if seq.aborted:
            self.pool.free_all(blocks)
            return False
        self.tables[seq.seq_id] = blocks
        return True

    def admit_with_watermark(self, seq: Sequence) -> bool:
        blocks = self.pool.allocate_span(self._need(seq))  # leak: the watermark path returns False without freeing
        if blocks is None:
            return False
        if self.pool.num_free() < self.watermark:
            return False
        self.tables[seq.seq_id] = blocks
        return True

    def append_slot(self, seq: Sequence) -> bool:
        block = self.pool.allocate()  # clean: stored in the table of a live sequence, freed otherwise
        if block is None:
            return False
        table = self.tables.get(seq.seq_id)
        if table is None:
            self.pool.free(block)
            return False
        table.append(block)
        return True

    def append_tail(self, seq: Sequence) -> bool:
        block = self.pool.allocate()  # leak: lost when the sequence has no table
        if block is None:
            return False
        table = self.tables.get(seq.seq_id)
        if table is not None:
            table.append(block)
        return table is not None

    def finish(self, seq_id: str) -> None:
        blocks = self.tables.pop(seq_id, [])
        self.pool.free_all(blocks)


class CowForker:
    """Copy-on-write of the last block when a sequence is forked."""

    def __init__(self, pool: BlockPool):
        self.pool = pool

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        fresh = self.pool.allocate()  # clean: near miss, replaced only when it is None
        if fresh is None:
            if parent.blocks:
                self.pool.free(parent.blocks.pop())
            fresh = self.pool.allocate()  # clean: checked for None and then given to the child
        if fresh is None:
            return False
        child.blocks.append(fresh)
        return True

    def fork_aligned(self, child: Sequence, align: int) -> bool:
        fresh = self.pool.allocate()  # leak: an unaligned block is dropped by the rebinding in the loop
        while fresh is not None and fresh % align:
            fresh = self.pool.allocate()  # leak: each unaligned replacement is dropped by the next round
        if fresh is None:
            return False
        child.blocks.append(fresh)
        return True

    def drop(self, seq: Sequence) -> None:
        while seq.blocks:
            self.pool.free(seq.blocks.pop())

    def swap_tail(self, seq: Sequence) -> bool:
        if not seq.blocks:
            return False
        fresh = self.pool.allocate()  # clean: near miss, the overwritten tail is freed first
        if fresh is None:
            return False
        self.pool.free(seq.blocks[-1])
        seq.blocks[-1] = fresh
        return True

    def retail(self, seq: Sequence) -> bool:
        if not seq.blocks:
            return False
        fresh = self.pool.allocate()  # leak: overwrites the old tail block, which is never freed
        if fresh is None:
            return False
        seq.blocks[-1] = fresh
        return True
