from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Dict, List, Optional

import torch


@dataclass(frozen=True)
class SlabHandle:
    size_class: int
    slab: int
    index: int


class Slab:
    """One big tensor cut into equal cells; a bitmap tells which are taken."""

    def __init__(self, cell: int, cells: int, device: torch.device) -> None:
        self.storage = torch.empty(cells, cell, device=device)
        self.cells = cells
        self._bitmap = 0

    def reserve(self) -> Optional[int]:
        for i in range(self.cells):
            if not self._bitmap >> i & 1:
                self._bitmap |= 1 << i
                return i
        return None

    def unreserve(self, index: int) -> None:
        self._bitmap &= ~(1 << index)

    @property
    def empty(self) -> bool:
        return self._bitmap == 0


class SlabAllocator:
    def __init__(self, classes: List[int], cells: int, device: torch.device) -> None:
        self.classes = sorted(classes)
        self.cells = cells
        self.device = device
        self._slabs: Dict[int, List[Slab]] = {c: [] for c in self.classes}
        self._lock = threading.Lock()

    def _class_for(self, numel: int) -> int:
        for c in self.classes:
            if numel <= c:
                return c
        raise ValueError(f"no size class for {numel}")

    def alloc(self, numel: int) -> SlabHandle:
        cls = self._class_for(numel)
        with self._lock:  # clean: with block
            for n, slab in enumerate(self._slabs[cls]):
                i = slab.reserve()  # clean: near miss, None when full, else returned in a handle
                if i is not None:
                    return SlabHandle(cls, n, i)
            slab = Slab(cls, self.cells, self.device)
            self._slabs[cls].append(slab)
            first = slab.reserve()  # clean: returned in a handle
            return SlabHandle(cls, len(self._slabs[cls]) - 1, first)

    def release(self, h: SlabHandle) -> None:
        with self._lock:  # clean: with block
            self._slabs[h.size_class][h.slab].unreserve(h.index)

    def tensor(self, h: SlabHandle, *shape: int) -> torch.Tensor:
        flat = self._slabs[h.size_class][h.slab].storage[h.index]
        numel = 1
        for s in shape:
            numel *= s
        return flat[:numel].view(*shape)
