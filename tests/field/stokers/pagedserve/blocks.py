from __future__ import annotations

from collections import deque
from typing import Deque, Dict, Iterable, List, Optional, Tuple


class BlockPool:
    """Reference counted KV blocks; block 0 is the null block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.refs: Dict[int, int] = {}
        self.hashes: Dict[int, int] = {}
        self._free: Deque[int] = deque(range(1, num_blocks))

    @property
    def available(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        blocks: List[int] = []
        for _ in range(n):
            block = self._free.popleft()
            self.refs[block] = 1
            blocks.append(block)
        return blocks

    def allocate_aligned(self, n: int, align: int) -> Optional[List[int]]:
        while len(self._free) >= n:
            block = self._free.popleft()  # leak: blocks passed over on the way to an aligned one are not put on the free list again
            if block % align:
                continue
            rest = self.allocate(n - 1)  # clean: handed on to the caller behind the aligned one
            if rest is None:
                self._free.appendleft(block)
                return None
            self.refs[block] = 1
            return [block, *rest]
        return None

    def touch(self, block: int) -> int:
        self.refs[block] += 1
        return block

    def lookup(self, hashes: Iterable[int]) -> List[int]:
        """Longest cached prefix, each of its blocks referenced once more."""
        hit: List[int] = []
        for h in hashes:
            block = self.hashes.get(h)
            if block is None or block not in self.refs:
                break
            hit.append(self.touch(block))  # clean: near miss, handed on to the caller in the list
        return hit

    def publish(self, block: int, h: int) -> None:
        self.hashes[h] = block

    def release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                del self.refs[block]
                self._free.append(block)


class CrossCache:
    """Slots for encoder outputs of multimodal inputs."""

    def __init__(self, slots: int) -> None:
        self._slots: List[int] = list(range(slots))

    def enlist(self) -> Tuple[bool, int]:
        if not self._slots:
            return False, -1
        return True, self._slots.pop()

    def delist(self, slot: int) -> None:
        self._slots.append(slot)
