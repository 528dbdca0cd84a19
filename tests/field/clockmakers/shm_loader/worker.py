"""Worker loop: fetch samples, pack them, put the segment on the ready queue."""
from __future__ import annotations

import logging
import time

import numpy as np

from .collate import pack_tokens
from .segments import SegmentTable

log = logging.getLogger(__name__)


class Worker:
    def __init__(self, table: SegmentTable, dataset, ready, batch: int):
        self.table = table
        self.dataset = dataset
        self.ready = ready
        self.batch = batch
        self.stopping = False

    def _samples(self, start: int) -> list[np.ndarray]:
        return [s for s in (self.dataset[i] for i in range(start, start + self.batch)) if s is not None]

    def run(self, starts: list[int]) -> None:
        for start in starts:
            seg = pack_tokens(self.table, self._samples(start))  # clean: put on the ready queue, the loader yields it up
            if seg is None:
                time.sleep(0.01)
                continue
            self.ready.put(seg.index)

    def run_filtered(self, starts: list[int], min_tokens: int) -> int:
        sent = 0
        for start in starts:
            seg = pack_tokens(self.table, self._samples(start))  # leak: `continue` for a short batch skips both the queue and yield_up
            if seg is None:
                continue
            if seg.length < min_tokens:
                log.debug("batch at %d is short", start)
                continue
            self.ready.put(seg.index)
            sent += 1
        return sent

    def prefill(self, start: int, nbytes: int) -> bool:
        seg = self.table.seize_best(nbytes)  # clean: put on the ready queue or yielded up when stopping
        if seg is None:
            return False
        if self.stopping:
            self.table.yield_up(seg)
            return False
        data = np.concatenate(self._samples(start))
        seg.length = min(data.size, nbytes // 4)
        seg.array((seg.length,))[:] = data[: seg.length]
        self.ready.put(seg.index)
        return True
