from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch


class OutOfBlocks(Exception):
    """The pool cannot serve the request."""


@dataclass(frozen=True)
class PageHandle:
    block_id: int
    data: torch.Tensor


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int, width: int) -> None:
        self.storage = torch.zeros(num_blocks, block_size, width)
        self.free_list: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.poisoned: set[int] = set()

    def num_free(self) -> int:
        return len(self.free_list)

    def allocate_block(self) -> PageHandle:
        if not self.free_list:
            raise OutOfBlocks
        bid, _ = self.free_list.popitem(last=False)  # clean: handed out as a page
        return PageHandle(bid, self.storage[bid])

    def allocate_sane(self) -> PageHandle | None:
        if not self.free_list:
            return None
        bid, _ = self.free_list.popitem(last=False)  # leak: a block with NaN returns None without being listed as poisoned or free
        if torch.isnan(self.storage[bid]).any():
            return None
        return PageHandle(bid, self.storage[bid])

    def scrub(self) -> int:
        bad = 0
        for _ in range(len(self.free_list)):
            bid, _ = self.free_list.popitem(last=False)  # clean: near miss, it goes either to the poisoned set or back to the list
            if torch.isnan(self.storage[bid]).any():
                self.poisoned.add(bid)
                bad += 1
                continue
            self.free_list[bid] = None
        return bad

    def free_block(self, page: PageHandle) -> None:
        self.free_list[page.block_id] = None

    def allocate_slots(self, n: int) -> list[PageHandle]:
        if self.num_free() < n:
            raise OutOfBlocks(n)
        return [self.allocate_block() for _ in range(n)]  # clean: handed out, the count was checked

    def free_slots(self, pages: list[PageHandle]) -> None:
        for p in reversed(pages):
            self.free_block(p)
