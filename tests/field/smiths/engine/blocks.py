from __future__ import annotations

from typing import List, Optional, Tuple


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int = 4) -> None:
        self.block_size = block_size
        self._free = list(range(num_blocks))
        self.allocated = 0

    def allocate(self, n: int) -> Optional[List[int]]:
        if len(self._free) < n:
            return None
        self.allocated += n
        return [self._free.pop() for _ in range(n)]

    def deallocate(self, blocks: List[int]) -> None:
        self.allocated -= len(blocks)
        self._free.extend(blocks)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate_tokens(self, tokens: int, lookahead: int = 0) -> Optional[List[int]]:
        blocks = self.allocate(self.blocks_for(tokens))  # clean: returned, with the lookahead when there is any
        if blocks is None:
            return None
        if lookahead:
            extra = self.allocate(self.blocks_for(lookahead))  # clean: near miss, joins the returned list
            if extra is not None:
                blocks += extra
        return blocks


class SlotTable:
    """Row numbers of the batch. take() answers -1 when all rows are in use."""

    def __init__(self, rows: int) -> None:
        self._free = list(range(rows - 1, -1, -1))
        self.taken = 0

    def take(self) -> int:
        if not self._free:
            return -1
        self.taken += 1
        return self._free.pop()

    def vacate(self, row: int) -> None:
        self.taken -= 1
        self._free.append(row)

    def take_aligned(self, align: int) -> int:
        skipped: List[int] = []
        found = -1
        while found < 0:
            row = self.take()  # clean: near miss, the misfits are vacated below, the fit is returned
            if row < 0:
                break
            if row % align == 0:
                found = row
            else:
                skipped.append(row)
        for row in skipped:
            self.vacate(row)
        return found

    def take_pair(self) -> Optional[Tuple[int, int]]:
        first = self.take()  # leak: no second row, the first is not vacated
        second = self.take()  # clean: returned; after a failed first there is none to take
        if first < 0 or second < 0:
            return None
        return first, second
