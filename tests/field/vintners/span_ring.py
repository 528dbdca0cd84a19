"""Fixed ring of span records for a step profiler; a record is busy from begin() to finish()."""
from __future__ import annotations

import time
from typing import Dict, Iterator, List, Optional


class Span:
    __slots__ = ("name", "t0", "t1", "busy")

    def __init__(self) -> None:
        self.name = ""
        self.t0 = self.t1 = 0.0
        self.busy = False


class SpanRing:
    def __init__(self, n: int) -> None:
        self._spans = [Span() for _ in range(n)]
        self._at = 0
        self.totals: Dict[str, float] = {}

    def begin(self, name: str) -> Optional[Span]:
        for _ in self._spans:
            span = self._spans[self._at]
            self._at = (self._at + 1) % len(self._spans)
            if not span.busy:
                span.busy = True
                span.name = name
                span.t0 = time.perf_counter()
                return span
        return None

    def finish(self, span: Span) -> float:
        span.t1 = time.perf_counter()
        span.busy = False
        took = span.t1 - span.t0
        self.totals[span.name] = self.totals.get(span.name, 0.0) + took
        return took


class SpanStack:
    """Nested spans of one thread."""

    def __init__(self, ring: SpanRing) -> None:
        self.ring = ring
        self._stack: List[Span] = []
        self._async: List[Span] = []

    def push(self, name: str) -> None:
        span = self.ring.begin(name)  # leak: unwind_to() pops inner spans without finishing them
        if span is not None:
            self._stack.append(span)

    def pop(self) -> float:
        return self.ring.finish(self._stack.pop()) if self._stack else 0.0

    def unwind_to(self, name: str) -> int:
        n = 0
        while self._stack and self._stack[-1].name != name:
            self._stack.pop()
            n += 1
        return n

    def start_async(self, name: str) -> bool:
        span = self.ring.begin(name)  # clean: near miss, settle() finishes each
        if span is None:
            return False
        self._async.append(span)
        return True

    def settle(self) -> float:
        spans, self._async = self._async, []
        return sum(map(self.ring.finish, spans))


def timed_batches(ring: SpanRing, batches) -> Iterator:
    """Time the fetch of each batch; the span is over before the batch goes out."""
    it = iter(batches)
    while True:
        span = ring.begin("fetch")  # leak: the break at the end of the data leaves the last span busy
        batch = next(it, None)
        if batch is None:
            break
        if span is not None:
            ring.finish(span)
        yield batch


def timed_steps(ring: SpanRing, batches, step) -> int:
    n = 0
    for batch in batches:
        span = ring.begin("step")  # clean: near miss, finished before the break
        ok = step(batch)
        if span is not None:
            ring.finish(span)
        if not ok:
            break
        n += 1
    return n
