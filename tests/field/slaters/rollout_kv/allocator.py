"""Reference-counted KV blocks."""
from __future__ import annotations

from typing import Iterable, List, Optional


class BlockAllocator:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.refs = [0] * num_blocks
        self._free = list(range(num_blocks))

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        out = [self._free.pop() for _ in range(n)]
        for b in out:
            self.refs[b] = 1
        return out

    def share(self, blocks: Iterable[int]) -> None:
        for b in blocks:
            self.refs[b] += 1

    def free(self, blocks: Iterable[int]) -> None:
        for b in blocks:
            self.refs[b] -= 1
            if self.refs[b] == 0:
                self._free.append(b)

    def num_free(self) -> int:
        return len(self._free)


class AdapterCache:
    """LoRA adapters on the device; pinned ones are not evicted."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._pins: dict = {}

    def pin(self, name: str) -> bool:
        if name not in self._pins:
            if len(self._pins) >= self.capacity and not self._evict():
                return False
            self._pins[name] = 0
        self._pins[name] += 1
        return True

    def unpin(self, name: str) -> None:
        self._pins[name] -= 1

    def _evict(self) -> bool:
        for name, pins in self._pins.items():
            if pins == 0:
                del self._pins[name]
                return True
        return False

    def pinned(self) -> int:
        return sum(self._pins.values())
