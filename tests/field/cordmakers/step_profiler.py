"""Step profiler with pooled CUDA events and trace pages.

Event pairs are taken around named sections; pages hold rendered rows until a
sink uploads them.  Meant to be left on in production, so nothing is created in
the steady state.
"""
from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Iterator, Optional, Protocol

import torch

log = logging.getLogger("profiler")


class EventPairs:
    def __init__(self, count: int):
        self._pairs = deque(
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)
        )
        self.missed = 0

    def lease(self):
        if not self._pairs:
            self.missed += 1
            return None
        return self._pairs.popleft()  # clean: returned to the caller

    def lease_ready(self):
        """A pair whose events have completed, so it may be recorded again."""
        for _ in range(len(self._pairs)):
            pair = self._pairs.popleft()  # clean: near miss, an unfinished pair is appended again before the next
            if pair[1].query():
                return pair
            self._pairs.append(pair)
        return None

    def unlease(self, pair) -> None:
        self._pairs.append(pair)


class Page:
    def __init__(self, rows: int):
        self.rows: list[tuple[str, float]] = []
        self.capacity = rows

    def full(self) -> bool:
        return len(self.rows) >= self.capacity


class PagePool:
    def __init__(self, pages: int, rows: int):
        self._clean = [Page(rows) for _ in range(pages)]

    def open_page(self) -> Optional[Page]:
        return self._clean.pop() if self._clean else None  # clean: returned to the caller

    def close_page(self, page: Page) -> None:
        page.rows.clear()
        self._clean.append(page)


class Sink(Protocol):
    def ready(self) -> bool: ...
    def upload(self, page: Page, on_done: Callable[[Page], None]) -> None: ...
    def send(self, page: Page) -> bool: ...


class StepProfiler:
    def __init__(self, pairs: EventPairs, pages: PagePool, sink: Sink, enabled: bool = True):
        self.pairs = pairs
        self.pages = pages
        self.sink = sink
        self.enabled = enabled
        self.open: dict[str, Any] = {}
        self.closed: list[tuple[str, Any]] = []
        self.page: Optional[Page] = None
        self.totals: dict[str, float] = {}

    def push(self, name: str) -> None:
        pair = self.pairs.lease()  # leak: a section opened twice overwrites its pair in self.open
        if pair is None:
            return
        pair[0].record()
        self.open[name] = pair

    def pop(self, name: str) -> None:
        pair = self.open.pop(name, None)
        if pair is None:
            return
        pair[1].record()
        self.closed.append((name, pair))

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        pair = self.pairs.lease() if self.enabled else None  # clean: near miss, moved into self.closed when not None, harvest() unleases
        if pair is not None:
            pair[0].record()
        try:
            yield
        finally:
            if pair is not None:
                pair[1].record()
                self.closed.append((name, pair))

    @contextmanager
    def gated_section(self, name: str, min_ms: float) -> Iterator[None]:
        pair = self.pairs.lease_ready()  # leak: a section below min_ms returns without unlease()
        if pair is None:
            yield
            return
        pair[0].record()
        begin = time.perf_counter()
        yield
        pair[1].record()
        if (time.perf_counter() - begin) * 1e3 < min_ms:
            return
        self.closed.append((name, pair))

    def harvest(self) -> int:
        torch.cuda.synchronize()
        count = 0
        while self.closed:
            name, pair = self.closed.pop()
            ms = pair[0].elapsed_time(pair[1])
            self.pairs.unlease(pair)
            self.totals[name] = self.totals.get(name, 0.0) + ms
            self._row(name, ms)
            count += 1
        return count

    def _row(self, name: str, ms: float) -> None:
        if self.page is None:
            self.page = self.pages.open_page()  # clean: near miss, opened only while self.page is None, ship() closes it
            if self.page is None:
                return
        self.page.rows.append((name, ms))
        if self.page.full():
            self.ship()

    def ship(self) -> None:
        if self.page is None:
            return
        page, self.page = self.page, None
        if not self.sink.ready():
            self.pages.close_page(page)
            return
        self.sink.upload(page, self.pages.close_page)

    def calibrate(self, n: int) -> float:
        total, used = 0.0, 0
        for _ in range(n):
            pair = self.pairs.lease()  # leak: a zero reading skips unlease()
            if pair is None:
                break
            pair[0].record()
            pair[1].record()
            pair[1].synchronize()
            ms = pair[0].elapsed_time(pair[1])
            if ms == 0.0:
                continue
            total += ms
            used += 1
            self.pairs.unlease(pair)
        return total / max(used, 1)

    def summary_page(self) -> Optional[Page]:
        page = self.pages.open_page()  # clean: filled and returned to the caller, None-checked
        if page is None:
            return None
        for name, ms in sorted(self.totals.items(), key=lambda kv: -kv[1])[:page.capacity]:
            page.rows.append((name, ms))
        return page

    def print_summary(self) -> None:
        page = self.summary_page()  # clean: closed after printing
        if page is None:
            return
        for name, ms in page.rows:
            log.info("%-40s %10.3f ms", name, ms)
        self.pages.close_page(page)

    def top_section(self) -> str:
        page = self.summary_page()  # leak: the page is read and not closed
        if page is None or not page.rows:
            return ""
        return page.rows[0][0]

    def close(self) -> None:
        for pair in self.open.values():
            self.pairs.unlease(pair)
        self.open.clear()
        self.harvest()
        self.ship()


def compare_kernels(pairs: EventPairs, a: Callable[[], None], b: Callable[[], None]) -> Optional[float]:
    first = pairs.lease()  # leak: kept when there is no second pair
    second = pairs.lease()  # clean: near miss, unleased when first is missing, else at the end
    if first is None or second is None:
        if first is None and second is not None:
            pairs.unlease(second)
        return None
    for (start, stop), fn in ((first, a), (second, b)):
        start.record()
        fn()
        stop.record()
    torch.cuda.synchronize()
    ratio = first[0].elapsed_time(first[1]) / max(second[0].elapsed_time(second[1]), 1e-6)
    pairs.unlease(first)
    pairs.unlease(second)
    return ratio


def time_many(pairs: EventPairs, fns: list[Callable[[], None]]) -> list[float]:
    with ExitStack() as stack:
        marks = []
        for fn in fns:
            pair = pairs.lease()  # clean: near miss, unleased by the callback on the exit stack
            if pair is None:
                break
            stack.callback(pairs.unlease, pair)
            pair[0].record()
            fn()
            pair[1].record()
            marks.append(pair)
        torch.cuda.synchronize()
        return [s.elapsed_time(e) for s, e in marks]
