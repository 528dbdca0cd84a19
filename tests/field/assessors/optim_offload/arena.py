"""First-fit extent allocator over one pinned host tensor."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch


@dataclass(frozen=True)
class Extent:
    offset: int
    numel: int


class HostArena:
    def __init__(self, numel: int, align: int = 128) -> None:
        self.align = align
        self.base = torch.empty(numel, dtype=torch.float32, pin_memory=True)
        self._holes: list[Extent] = [Extent(0, numel)]

    def reserve(self, numel: int) -> Optional[Extent]:
        want = -(-numel // self.align) * self.align
        for i, hole in enumerate(self._holes):
            if hole.numel >= want:
                self._holes.pop(i)  # clean: near miss, the rest of the hole goes back into the list
                if hole.numel > want:
                    self._holes.insert(i, Extent(hole.offset + want, hole.numel - want))
                return Extent(hole.offset, want)
        return None

    def release(self, ext: Extent) -> None:
        self._holes.append(ext)
        self._holes.sort(key=lambda e: e.offset)
        merged: list[Extent] = []
        for e in self._holes:
            if merged and merged[-1].offset + merged[-1].numel == e.offset:
                last = merged.pop()
                e = Extent(last.offset, last.numel + e.numel)
            merged.append(e)
        self._holes = merged

    def view(self, ext: Extent, numel: int) -> torch.Tensor:
        return self.base.narrow(0, ext.offset, numel)
