from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(eq=False)
class BlockLease:
    ids: list[int]
    tokens: int = 0

    def __len__(self) -> int:
        return len(self.ids)


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free = list(range(num_blocks))
        self._lock = threading.Lock()

    def blocks_for(self, tokens: int) -> int:
        return (tokens + self.block_size - 1) // self.block_size

    def reserve(self, tokens: int) -> BlockLease | None:
        n = self.blocks_for(tokens)
        with self._lock:
            if len(self._free) < n:
                return None
            ids, self._free = self._free[:n], self._free[n:]
        return BlockLease(ids, tokens)

    def surrender(self, lease: BlockLease) -> None:
        with self._lock:
            self._free.extend(lease.ids)
        lease.ids = []

    def trim(self, lease: BlockLease, tokens: int) -> None:
        keep = self.blocks_for(tokens)
        with self._lock:
            self._free.extend(lease.ids[keep:])
        lease.ids = lease.ids[:keep]
        lease.tokens = tokens

    def split(self, lease: BlockLease, at: int) -> tuple[BlockLease, BlockLease]:
        k = self.blocks_for(at)
        rest = BlockLease(lease.ids[k:], lease.tokens - at)
        lease.ids, lease.tokens = lease.ids[:k], at
        return lease, rest
