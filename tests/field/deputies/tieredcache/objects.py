"""Memory objects with a reference count; the last ref_down gives the memory back."""
from __future__ import annotations

from typing import Callable

import torch


class MemoryObj:
    def __init__(self, raw: torch.Tensor, size: int, on_zero: Callable[["MemoryObj"], None]) -> None:
        self.raw = raw
        self.size = size
        self._refs = 1
        self._on_zero = on_zero

    @property
    def tensor(self) -> torch.Tensor:
        return self.raw[: self.size]

    def ref_up(self) -> None:
        self._refs += 1

    def ref_down(self) -> None:
        self._refs -= 1
        if self._refs == 0:
            self._on_zero(self)


class PagedAllocator:
    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._pages = [torch.empty(page_size, dtype=torch.uint8) for _ in range(pages)]

    def allocate(self, size: int) -> MemoryObj | None:
        if size > self.page_size or not self._pages:
            return None
        return MemoryObj(self._pages.pop(), size, self._recycle)

    def _recycle(self, obj: MemoryObj) -> None:
        self._pages.append(obj.raw)
