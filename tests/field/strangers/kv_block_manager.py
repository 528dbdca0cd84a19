"""Paged KV cache: physical blocks, block tables and the copy-on-write fork of a sequence."""
from __future__ import annotations

from collections import deque


class BlockAllocator:
    def __init__(self, num_blocks: int) -> None:
        self._free: deque[int] = deque(range(num_blocks))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int | None:
        if not self._free:
            return None
        block = self._free.popleft()
        self._used.add(block)
        return block

    def free(self, block: int) -> None:
        self._used.discard(block)
        self._free.append(block)


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int, watermark: int = 2) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.block_size = block_size
        self.watermark = watermark
        self.tables: dict[int, list[int]] = {}

    def admit(self, seq_id: int, num_tokens: int) -> bool:
        if seq_id in self.tables:
            return True
        needed = -(-num_tokens // self.block_size)
        table: list[int] = []
        for _ in range(needed):
            block = self.allocator.allocate()  # clean: near miss, rolled back when short
            if block is None:
                for held in table:
                    self.allocator.free(held)
                return False
            table.append(block)
        self.tables[seq_id] = table
        return True

    def append_slot(self, seq_id: int, length: int) -> bool:
        table = self.tables[seq_id]
        if length <= len(table) * self.block_size:
            return True
        block = self.allocator.allocate()  # clean: near miss, goes into the live table
        if block is None:
            return False
        table.append(block)
        return True

    def fork(self, parent: int, child: int) -> bool:
        if child in self.tables:
            return False
        copied: list[int] = []
        for _ in self.tables[parent]:
            block = self.allocator.allocate()  # leak: shortage returns without giving back the copied ones
            if block is None:
                return False
            copied.append(block)
        self.tables[child] = copied
        return True

    def has_headroom(self) -> bool:
        block = self.allocator.allocate()  # leak: probe kept when below the watermark
        if block is None:
            return False
        if self.allocator.num_free < self.watermark:
            return False
        self.allocator.free(block)
        return True

    def release(self, seq_id: int) -> None:
        for block in self.tables.pop(seq_id, ()):
            self.allocator.free(block)
