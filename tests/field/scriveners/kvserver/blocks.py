"""Blocks of the key value cache with reference counts for shared prefixes."""
from __future__ import annotations

from collections import deque
from typing import Deque, Optional


class BlockManager:
    def __init__(self, total: int, block_size: int) -> None:
        self.block_size = block_size
        self._free: Deque[int] = deque(range(total))
        self._refs = [0] * total
        self._prefix: dict[int, int] = {}

    def free_count(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[int]:
        if not self._free:
            return None
        block = self._free.popleft()
        self._refs[block] = 1
        return block

    def share(self, block: int) -> int:
        """One more holder of a block; every holder calls release."""
        self._refs[block] += 1
        return block

    def release(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)

    def release_all(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.release(block)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate_run(self, count: int) -> Optional[list[int]]:
        if count > len(self._free):
            return None
        run = []
        for _ in range(count):
            run.append(self.allocate())  # clean: near miss, the count was checked, the run is returned
        return run

    def allocate_up_to(self, count: int) -> list[int]:
        """As many as there are, perhaps none."""
        run: list[int] = []
        while len(run) < count:
            block = self.allocate()  # clean: near miss, a short run is returned as it is
            if block is None:
                break
            run.append(block)
        return run

    def allocate_even(self, count: int) -> Optional[list[int]]:
        """A run of blocks with even numbers only."""
        run: list[int] = []
        while len(run) < count:
            block = self.allocate()  # leak: odd blocks are neither kept nor released
            if block is None:
                self.release_all(run)
                return None
            if block % 2 == 1:
                continue
            run.append(block)
        return run

    def remember_prefix(self, key: int, block: int) -> None:
        """The prefix table is one holder of the block."""
        if key in self._prefix:
            return
        self._prefix[key] = self.share(block)  # clean: released by forget_prefix

    def forget_prefix(self, key: int) -> None:
        block = self._prefix.pop(key, None)
        if block is not None:
            self.release(block)

    def match_prefix(self, keys: list[int]) -> list[int]:
        """The caller becomes a holder of every matched block."""
        matched: list[int] = []
        for key in keys:
            block = self._prefix.get(key)
            if block is None:
                break
            matched.append(self.share(block))  # clean: handed to the caller
        return matched
