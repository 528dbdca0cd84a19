"""Reference-counted staging segments."""
from __future__ import annotations

import threading
from typing import List, Optional

import torch


class Segment:
    def __init__(self, arena: "SegmentArena", data: torch.Tensor):
        self._arena = arena
        self._count = 0
        self.data = data

    def retain(self) -> "Segment":
        self._count += 1
        return self

    def drop(self) -> None:
        """Give up one reference; the last one returns the segment."""
        self._count -= 1
        if self._count == 0:
            self._arena._reclaim(self)


class SegmentArena:
    def __init__(self, count: int, numel: int):
        self._lot: List[Segment] = [Segment(self, torch.zeros(numel)) for _ in range(count)]
        self._guard = threading.Lock()

    def new(self) -> Optional[Segment]:
        """A segment with one reference for the caller."""
        with self._guard:
            if not self._lot:
                return None
            seg = self._lot.pop()  # clean: returned with its first reference
        return seg.retain()  # clean: the reference belongs to the caller

    def _reclaim(self, seg: Segment) -> None:
        with self._guard:
            self._lot.append(seg)
