"""Fixed set of staging segments in host memory."""
from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Iterator, List, Optional

import torch
from torch import Tensor


class Segment:
    def __init__(self, index: int, nbytes: int) -> None:
        self.index = index
        self.storage = torch.empty(nbytes, dtype=torch.uint8)
        self.used = 0

    def room(self) -> int:
        return self.storage.numel() - self.used

    def store(self, t: Tensor) -> None:
        raw = t.detach().cpu().contiguous().view(-1).view(torch.uint8)
        self.storage[self.used : self.used + raw.numel()].copy_(raw)
        self.used += raw.numel()


class SegmentPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._detached: List[Segment] = [Segment(i, nbytes) for i in range(count)]
        self._cond = threading.Condition()

    def attach(self, timeout: Optional[float] = None) -> Optional[Segment]:
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._detached), timeout):
                return None
            segment = self._detached.pop()  # clean: handed to the caller
            segment.used = 0
            return segment

    def attach_nowait(self, minimum: int) -> Optional[Segment]:
        with self._cond:
            if not self._detached:
                return None
            segment = self._detached.pop(0)  # leak: a segment smaller than the minimum is not put back before None is returned
            if segment.storage.numel() < minimum:
                return None
            segment.used = 0
            return segment

    def detach(self, segment: Segment) -> None:
        with self._cond:
            self._detached.append(segment)
            self._cond.notify()

    @contextmanager
    def attached(self) -> Iterator[Segment]:
        segment = self.attach()  # clean: detached in the finally clause
        try:
            yield segment
        finally:
            self.detach(segment)
