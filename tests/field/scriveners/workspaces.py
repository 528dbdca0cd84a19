"""Device workspaces of the kernels: spans of one big allocation, and the workers that use them."""
from __future__ import annotations

import functools
import logging
import threading
from dataclasses import dataclass
from typing import Any, Callable, Optional

log = logging.getLogger("workspaces")


@dataclass(frozen=True, order=True)
class Span:
    size: int
    offset: int


class SpanAllocator:
    """First fit over a list of free spans."""

    def __init__(self, sizes: list[int]) -> None:
        self._free: list[Span] = []
        self._lock = threading.RLock()
        offset = 0
        for size in sizes:
            self._free.append(Span(size, offset))
            offset += size

    def carve(self, size: int) -> Optional[Span]:
        with self._lock:
            for i, span in enumerate(self._free):
                if span.size >= size:
                    return self._free.pop(i)
        return None

    def uncarve(self, span: Span) -> None:
        with self._lock:
            self._free.append(span)

    def carve_tight(self, size: int) -> Optional[Span]:
        """Tries two spans and gives the smaller one."""
        with self._lock:
            first = self.carve(size)  # clean: near miss, returned, or put back when the other one is smaller
            if first is None:
                return None
            second = self.carve(size)  # leak: not put back when the first one is as small
            if second is not None and second.size < first.size:
                self.uncarve(first)
                return second
            return first

    def carve_aligned(self, size: int, alignment: int) -> Optional[Span]:
        with self._lock:
            span = self.carve(size + alignment)  # clean: near miss, put back and tried again only when too short
            if span is None:
                return None
            if span.offset % alignment and span.size < size + 2 * alignment:
                self.uncarve(span)
                return self.carve(size + 2 * alignment)  # clean: handed to the caller
            return span

    def sort(self) -> int:
        """Small spans first, so that first fit is close to best fit."""
        with self._lock:
            spans: list[Span] = []
            while (span := self.carve(1)) is not None:  # clean: near miss, all of them are put back in order
                spans.append(span)
            for span in sorted(spans):
                self.uncarve(span)
            return len(spans)

    def usable(self, minimum: int) -> int:
        """Counts the spans of a minimal size."""
        with self._lock:
            spans: list[Span] = []
            while (span := self.carve(1)) is not None:  # leak: spans below the minimum are not put back
                spans.append(span)
            large = [span for span in spans if span.size >= minimum]
            for span in large:
                self.uncarve(span)
            return len(large)


class Worker:
    """Holds one workspace from its start to its stop."""

    def __init__(self, allocator: SpanAllocator, size: int) -> None:
        self.allocator = allocator
        self.size = size
        self.span: Optional[Span] = None

    def start(self) -> bool:
        if self.span is None:
            self.span = self.allocator.carve(self.size)  # clean: put back by stop()
        return self.span is not None

    def stop(self) -> None:
        if self.span is not None:
            self.allocator.uncarve(self.span)
            self.span = None


class AttentionWorker(Worker):
    """A second span for the statistics of the softmax."""

    def __init__(self, allocator: SpanAllocator, size: int, stats: int) -> None:
        super().__init__(allocator, size)
        self.stats_size = stats
        self.stats: Optional[Span] = None

    def start(self) -> bool:
        if not super().start():  # clean: super().stop() puts it back
            return False
        if self.stats is None:
            self.stats = self.allocator.carve(self.stats_size)  # clean: near miss, put back by the stop() below
        return self.stats is not None

    def stop(self) -> None:
        if self.stats is not None:
            self.allocator.uncarve(self.stats)
            self.stats = None
        super().stop()


class GemmWorker(Worker):
    """A second span for the partial sums of split-k."""

    def __init__(self, allocator: SpanAllocator, size: int, splits: int) -> None:
        super().__init__(allocator, size)
        self.splits = splits
        self.partial: Optional[Span] = None

    def start(self) -> bool:
        if not super().start():  # clean: the inherited stop() puts this one back
            return False
        if self.partial is None:
            self.partial = self.allocator.carve(self.size * self.splits)  # leak: the inherited stop() knows one span
        return self.partial is not None


def with_workspace(size: int) -> Callable:
    """Gives a method a span of self.allocator as its first argument."""

    def wrap(fn: Callable) -> Callable:
        @functools.wraps(fn)
        def inner(self, *args: Any) -> Any:
            span = self.allocator.carve(size)  # clean: near miss, put back after the method
            if span is None:
                return None
            try:
                return fn(self, span, *args)
            finally:
                self.allocator.uncarve(span)

        return inner

    return wrap


class Sampler:
    def __init__(self, allocator: SpanAllocator) -> None:
        self.allocator = allocator

    @with_workspace(4096)
    def top_p(self, span: Span, logits: list[float], p: float) -> list[int]:
        order = sorted(range(len(logits)), key=logits.__getitem__, reverse=True)
        keep = max(1, int(p * min(len(order), span.size)))
        return order[:keep]

    def argmax(self, logits: list[float]) -> int:
        span = self.allocator.carve_tight(len(logits))  # leak: used for its size only and dropped
        if span is None:
            return -1
        return max(range(min(len(logits), span.size)), key=logits.__getitem__)
