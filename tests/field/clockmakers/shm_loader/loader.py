"""The consuming side, in the trainer's process."""
from __future__ import annotations

from typing import Iterator

import torch

from .segments import Segment, SegmentTable


class SharedLoader:
    def __init__(self, table: SegmentTable, ready):
        self.table = table
        self.ready = ready
        self.calibration: Segment | None = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            index = self.ready.get()
            if index is None:
                return
            seg = self.table.segments[index]
            batch = torch.from_numpy(seg.array((seg.length,)).copy())
            self.table.yield_up(seg)
            yield batch

    def synthetic(self, count: int, tokens: int, vocab: int) -> Iterator[torch.Tensor]:
        """Random batches through a segment, to measure the copy."""
        seg = self.table.seize_best(tokens * 4)  # leak: the generator returns early for a vocabulary of zero
        if seg is None:
            return
        for _ in range(count):
            if vocab <= 0:
                return
            view = torch.from_numpy(seg.array((tokens,)))
            view.random_(0, vocab)
            yield view.clone()
        self.table.yield_up(seg)

    def calibrate(self, nbytes: int) -> None:
        if self.calibration is None:
            self.calibration = self.table.seize_best(nbytes)  # clean: kept in calibration, which close() yields up

    def close(self) -> None:
        if self.calibration is not None:
            self.table.yield_up(self.calibration)
            self.calibration = None
