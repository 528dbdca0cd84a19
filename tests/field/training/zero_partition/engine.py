from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional

import torch

from .partition import ParamCoordinator, PartitionedParam
from .pool import GatherPool

logger = logging.getLogger(__name__)


@contextmanager
def full_param(coord: ParamCoordinator, p: PartitionedParam) -> Iterator[torch.Tensor]:
    buf = coord.temp_full(p)  # clean: the finally puts it back
    if buf is None:
        raise MemoryError(p.name)
    try:
        yield buf[: p.numel].view(p.full_shape)
    finally:
        coord.pool.put_back(buf)


class ZeroEngine:
    def __init__(self, coord: ParamCoordinator) -> None:
        self.coord = coord

    def export(self) -> Dict[str, torch.Tensor]:
        state = {}
        for p in self.coord.params:
            with full_param(self.coord, p) as w:  # clean: context manager
                state[p.name] = w.clone()
        return state

    def export_half(self) -> Dict[str, torch.Tensor]:
        state = {}
        for p in self.coord.params:
            buf = self.coord.temp_full(p)  # leak: nothing ever puts the buffer back
            if buf is None:
                continue
            state[p.name] = buf[: p.numel].view(p.full_shape).clone().half()
        return state

    def gather_window(self, start: int, size: int) -> Optional[List[torch.Tensor]]:
        bufs: List[torch.Tensor] = []
        for p in self.coord.params[start : start + size]:
            buf = self.coord.temp_full(p)  # clean: near miss, a partial window is put back before None
            if buf is None:
                while bufs:
                    self.coord.pool.put_back(bufs.pop())
                return None
            bufs.append(buf)
        return bufs

    def window_norm(self, start: int, size: int) -> float:
        bufs = self.gather_window(start, size)  # clean: every buffer of the window is put back
        if bufs is None:
            return -1.0
        total = sum(float(b.float().norm()) for b in bufs)
        for b in bufs:
            self.coord.pool.put_back(b)
        return total

    def window_peak(self, start: int, size: int) -> float:
        bufs = self.gather_window(start, size)  # leak: the search stops at the first infinite buffer
        if bufs is None:
            return -1.0
        peak = 0.0
        for b in bufs:
            peak = max(peak, float(b.float().abs().max()))
            if peak == float("inf"):
                return peak
            self.coord.pool.put_back(b)
        return peak


def build(params: List[PartitionedParam], capacity: int) -> ZeroEngine:
    largest = max(p.numel for p in params)
    pool = GatherPool(capacity, largest)
    return ZeroEngine(ParamCoordinator(pool, params))
