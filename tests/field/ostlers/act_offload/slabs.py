"""Pinned host slabs, cut into equal pages."""
from __future__ import annotations

import threading
from typing import List, Optional, Set

import torch


class HostSlab:
    def __init__(self, pages: int, page_bytes: int):
        self.page_bytes = page_bytes
        self.memory = torch.empty(pages * page_bytes, dtype=torch.uint8, pin_memory=True)
        self._lock = threading.Lock()
        self._free: Set[int] = set(range(pages))

    def pages_for(self, nbytes: int) -> int:
        return -(-nbytes // self.page_bytes)

    def draw(self, count: int) -> Optional[List[int]]:
        with self._lock:
            if len(self._free) < count:
                return None
            return [self._free.pop() for _ in range(count)]

    def deposit(self, pages: List[int]) -> None:
        with self._lock:
            self._free.update(pages)

    def page(self, number: int) -> torch.Tensor:
        return self.memory[number * self.page_bytes : (number + 1) * self.page_bytes]


class SlabSet:
    """Several slabs; a tensor lies in one of them."""

    def __init__(self, slabs: List[HostSlab]):
        self.slabs = slabs

    def draw(self, nbytes: int) -> Optional["PageRun"]:
        for slab in self.slabs:
            pages = slab.draw(slab.pages_for(nbytes))  # clean: moved into the run that is returned
            if pages is not None:
                return PageRun(slab, pages, nbytes)
        return None

    def draw_mirrored(self, nbytes: int) -> Optional[List["PageRun"]]:
        """A run in each slab, or nothing."""
        runs: List[PageRun] = []
        for slab in self.slabs:
            pages = slab.draw(slab.pages_for(nbytes))  # leak: earlier runs are dropped for a full slab
            if pages is None:
                return None
            runs.append(PageRun(slab, pages, nbytes))
        return runs


class PageRun:
    def __init__(self, slab: HostSlab, pages: List[int], nbytes: int):
        self.slab = slab
        self.pages = pages
        self.nbytes = nbytes

    def write(self, raw: torch.Tensor) -> None:
        for i, number in enumerate(self.pages):
            piece = raw[i * self.slab.page_bytes : (i + 1) * self.slab.page_bytes]
            self.slab.page(number)[: piece.numel()].copy_(piece, non_blocking=True)

    def read(self) -> torch.Tensor:
        return torch.cat([self.slab.page(n) for n in self.pages])[: self.nbytes]

    def close(self) -> None:
        self.slab.deposit(self.pages)
        self.pages = []
