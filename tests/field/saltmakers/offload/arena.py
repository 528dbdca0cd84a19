"""Host memory in pages, and a pinned arena with a budget on top of it."""
from __future__ import annotations

import bisect
from typing import Dict, List, Optional, Tuple

import torch

Run = Tuple[int, int]  # first page, pages


class HostPages:
    def __init__(self, pages: int, page_elems: int):
        self.page_elems = page_elems
        self.host = torch.empty(pages * page_elems, pin_memory=torch.cuda.is_available())
        self.gaps: List[Run] = [(0, pages)]

    def book(self, pages: int) -> Optional[Run]:
        for i, (start, length) in enumerate(self.gaps):
            if length < pages:
                continue
            if length == pages:
                del self.gaps[i]
            else:
                self.gaps[i] = (start + pages, length - pages)
            return start, pages
        return None

    def unbook(self, run: Run) -> None:
        bisect.insort(self.gaps, run)

    def tensor(self, run: Run) -> torch.Tensor:
        lo = run[0] * self.page_elems
        return self.host[lo : lo + run[1] * self.page_elems]


class Block:
    """What the arena hands out: a run of pages seen as a tensor of the wanted size."""

    def __init__(self, arena: "PinnedArena", run: Run, numel: int):
        self.arena = arena
        self.run = run
        self.data = arena.pages.tensor(run)[:numel]


class PinnedArena:
    def __init__(self, pages: HostPages, budget_pages: int):
        self.pages = pages
        self.budget = budget_pages
        self.spent = 0
        self.cached: Dict[int, List[Block]] = {}

    def lease_block(self, numel: int) -> Optional[Block]:
        want = -(-numel // self.pages.page_elems)
        if self.cached.get(want):
            block = self.cached[want].pop()  # clean: handed to the caller
            block.data = self.pages.tensor(block.run)[:numel]
            return block
        run = self.pages.book(want)  # leak: over the budget the booked run is not unbooked
        if run is None:
            return None
        if self.spent + want > self.budget:
            return None
        self.spent += want
        return Block(self, run, numel)

    def lease_like(self, t: torch.Tensor) -> Optional[Block]:
        block = self.lease_block(t.numel())  # clean: filled and handed to the caller
        if block is not None:
            block.data.copy_(t.view(-1))
        return block

    def end_block(self, block: Block) -> None:
        self.cached.setdefault(block.run[1], []).append(block)

    def shrink(self) -> None:
        for blocks in self.cached.values():
            for block in blocks:
                self.pages.unbook(block.run)
                self.spent -= block.run[1]
        self.cached.clear()
