from __future__ import annotations

from collections import deque
from typing import Callable, Optional

from .dispatch import Dispatcher, Inflight, Rows


class ExpertParallelLayer:
    """Two-batch overlap: the combine of one half hides the dispatch of the other."""

    def __init__(self, dispatcher: Dispatcher, experts: Callable[[Rows], None]) -> None:
        self.dispatcher = dispatcher
        self.experts = experts
        self._queue: deque[Inflight] = deque()

    def forward(self, rows: Rows) -> Rows:
        inf = self.dispatcher.dispatch(rows)  # clean: combined
        if inf is None:
            self.experts(rows)
            return rows
        self.experts(inf.buf.data)
        return self.dispatcher.combine(inf)

    def forward_overlapped(self, halves: list[Rows]) -> list[Rows]:
        out: list[Rows] = []
        prev: Optional[Inflight] = None
        for rows in halves:
            inf = self.dispatcher.dispatch_low_latency(rows)  # clean: near miss, combined one round later or after the loop
            if prev is not None:
                self.experts(prev.buf.data)
                out.append(self.dispatcher.combine(prev))
            prev = inf
            if inf is None:
                self.experts(rows)
                out.append(rows)
        if prev is not None:
            self.experts(prev.buf.data)
            out.append(self.dispatcher.combine(prev))
        return out

    def submit(self, rows: Rows) -> bool:
        inf = self.dispatcher.dispatch_low_latency(rows)  # clean: queued, drain combines
        if inf is None:
            return False
        self._queue.append(inf)
        return True

    def drain(self) -> list[Rows]:
        out = []
        while self._queue:
            inf = self._queue.popleft()
            self.experts(inf.buf.data)
            out.append(self.dispatcher.combine(inf))
        return out

    def forward_shared(self, rows: Rows, shared: Callable[[Rows], Rows], skip_routed: bool) -> Rows:
        inf = self.dispatcher.dispatch_low_latency(rows)  # leak: with skip_routed the dispatch is never combined
        base = shared(rows)
        if inf is None or skip_routed:
            return base
        self.experts(inf.buf.data)
        routed = self.dispatcher.combine(inf)
        return [[a + b for a, b in zip(x, y)] for x, y in zip(base, routed)]
