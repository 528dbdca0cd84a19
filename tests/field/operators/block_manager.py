"""Paged KV cache block manager with per-sequence block tables."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


class NoFreeBlocks(RuntimeError):
    """Raised when the pool cannot satisfy an allocation."""


@dataclass
class Sequence:
    seq_id: int
    tokens: list[int]
    max_len: int = 4096
    block_table: list[int] = field(default_factory=list)

    def num_blocks(self, block_size: int) -> int:
        return (len(self.tokens) + block_size - 1) // block_size


class BlockPool:
    """Fixed number of KV blocks, handed out by index."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        if not self._free:
            raise NoFreeBlocks("out of KV blocks")
        return self._free.popleft()  # clean: handed to the caller

    def allocate_many(self, n: int) -> list[int] | None:
        """Allocate n blocks, or None when fewer are free."""
        if n > len(self._free):
            return None
        return [self._free.popleft() for _ in range(n)]  # clean: near miss, size was checked, the whole list is returned

    def free(self, block_id: int) -> None:
        self._free.append(block_id)

    def free_many(self, block_ids: list[int]) -> None:
        self._free.extend(block_ids)


class BlockManager:
    """Keeps the block tables of all running sequences."""

    def __init__(self, pool: BlockPool, watermark: float = 0.01) -> None:
        self.pool = pool
        self.watermark_blocks = max(1, int(watermark * pool.num_blocks))
        self.tables: dict[int, list[int]] = {}
        self.swapped: set[int] = set()

    def can_append(self) -> bool:
        return self.pool.num_free > self.watermark_blocks

    def allocate(self, seq: Sequence) -> bool:
        """Allocate the prompt blocks of a new sequence."""
        if seq.seq_id in self.tables:
            return True
        blocks = self.pool.allocate_many(seq.num_blocks(self.pool.block_size))  # leak: sequences over max_len are refused after the blocks were taken
        if blocks is None:
            return False
        if len(seq.tokens) > seq.max_len:
            return False
        self.tables[seq.seq_id] = blocks
        seq.block_table = blocks
        return True

    def append_slot(self, seq: Sequence) -> int:
        """Make room for one more token and return its slot."""
        table = self.tables[seq.seq_id]
        if len(seq.tokens) > len(table) * self.pool.block_size:
            table.append(self.pool.allocate())  # clean: kept in the table, free() gives the table back
        last = len(seq.tokens) - 1
        return table[last // self.pool.block_size] * self.pool.block_size + last % self.pool.block_size

    def append_lookahead(self, seq: Sequence, num_slots: int) -> list[int]:
        """Reserve blocks for speculative tokens."""
        table = self.tables[seq.seq_id]
        needed = (len(seq.tokens) + num_slots + self.pool.block_size - 1) // self.pool.block_size
        added: list[int] = []
        while len(table) + len(added) < needed:
            if not self.can_append():
                return []
            added.append(self.pool.allocate())  # leak: the watermark return drops what this loop has added so far
        table.extend(added)
        return added

    def fork(self, parent: Sequence, child: Sequence) -> list[tuple[int, int]]:
        """Copy the parent's table; returns (src, dst) pairs for the copy kernel."""
        copies: list[tuple[int, int]] = []
        dst_table: list[int] = []
        for src in self.tables[parent.seq_id]:
            try:
                dst = self.pool.allocate()  # clean: near miss, the partial table is freed in the handler
            except NoFreeBlocks:
                self.pool.free_many(dst_table)
                return []
            dst_table.append(dst)
            copies.append((src, dst))
        self.tables[child.seq_id] = dst_table
        child.block_table = dst_table
        return copies

    def swap_in(self, seq: Sequence) -> dict[int, int]:
        """Bring a swapped sequence back; maps host blocks to device blocks."""
        if seq.seq_id not in self.swapped:
            return {}
        host = seq.block_table
        device = self.pool.allocate_many(len(host))  # clean: near miss, None means nothing was taken
        if device is None:
            return {}
        self.swapped.discard(seq.seq_id)
        self.tables[seq.seq_id] = device
        seq.block_table = device
        return dict(zip(host, device))

    def swap_out(self, seq: Sequence, host_blocks: list[int]) -> None:
        device = self.tables.pop(seq.seq_id)
        self.pool.free_many(device)
        seq.block_table = host_blocks
        self.swapped.add(seq.seq_id)

    def compact(self, seq: Sequence) -> list[tuple[int, int]]:
        """Move a running sequence to fresh blocks; returns (src, dst) pairs."""
        current = self.tables[seq.seq_id]
        table = self.pool.allocate_many(len(current))  # leak: overwrites the current table, whose blocks are not freed
        if table is None:
            return []
        pairs = list(zip(current, table))
        self.tables[seq.seq_id] = table
        seq.block_table = table
        return pairs

    def copy_on_write(self, seq: Sequence, index: int) -> tuple[int, int]:
        """Replace one block of the table by a private copy."""
        table = self.tables[seq.seq_id]
        fresh = self.pool.allocate()  # clean: near miss, the replaced block is freed before it is overwritten
        stale = table[index]
        self.pool.free(stale)
        table[index] = fresh
        return stale, fresh

    def probe_capacity(self, want: int) -> bool:
        """Check that a burst of `want` blocks would fit right now."""
        blocks = self.pool.allocate_many(want)  # leak: only returned to the pool when the watermark would be broken
        if blocks is None:
            return False
        if self.pool.num_free < self.watermark_blocks:
            self.pool.free_many(blocks)
            return False
        return True

    def free(self, seq: Sequence) -> None:
        blocks = self.tables.pop(seq.seq_id, None)
        if blocks is None:
            return
        self.pool.free_many(blocks)
        seq.block_table = []
