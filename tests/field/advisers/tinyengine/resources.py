from __future__ import annotations

from collections import deque


class BlockAllocator:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, n: int) -> list[int] | None:
        if n > len(self._free):
            return None
        return [self._free.popleft() for _ in range(n)]

    def allocate_aligned(self, n: int) -> list[int] | None:
        if n + 1 > len(self._free):
            return None
        if self._free[0] % 2:
            self._free.rotate(-1)
        return [self._free.popleft() for _ in range(n)]

    def free(self, blocks: list[int]) -> None:
        self._free.extend(blocks)


class BatchSlots:
    def __init__(self, max_num_seqs: int) -> None:
        self._heap = list(reversed(range(max_num_seqs)))

    def pop_slot(self) -> int:
        return self._heap.pop() if self._heap else -1

    def push_slot(self, slot: int) -> None:
        self._heap.append(slot)
