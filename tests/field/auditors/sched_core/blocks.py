from __future__ import annotations

from typing import Optional


class BlockAllocator:
    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks))
        self.refs = [0] * num_blocks

    def allocate(self) -> Optional[int]:
        if not self._free:
            return None
        block = self._free.pop()
        self.refs[block] = 1
        return block

    def release(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self._free.append(block)

    def allocate_n(self, n: int) -> Optional[list[int]]:
        if n > len(self._free):
            return None
        out: list[int] = []
        for _ in range(n):
            block = self.allocate()  # clean: near miss, the length check above rules None out and the list is returned
            if block is not None:
                out.append(block)
        return out

    def release_all(self, blocks: list[int]) -> None:
        while blocks:
            self.release(blocks.pop())


class SwapSpace:
    def __init__(self, slots: int) -> None:
        self._free = list(range(slots))

    def reserve(self, n: int) -> list[int]:
        if n > len(self._free):
            return []
        taken, self._free = self._free[:n], self._free[n:]
        return taken

    def release(self, slots: list[int]) -> None:
        self._free.extend(slots)
