"""Keyed windows of a stream processor: state cells from a slab, timers, barriers and side outputs."""
from __future__ import annotations

import abc
import heapq
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, Iterator, List, Tuple


class Cell:
    __slots__ = ("at", "count", "total", "lo", "hi")

    def __init__(self, at: int) -> None:
        self.at = at
        self.clear()

    def clear(self) -> None:
        self.count = 0
        self.total = 0.0
        self.lo = float("inf")
        self.hi = float("-inf")

    def add(self, v: float) -> None:
        self.count += 1
        self.total += v
        self.lo = min(self.lo, v)
        self.hi = max(self.hi, v)


class SlabFull(Exception):
    pass


class CellSlab:
    def __init__(self, size: int) -> None:
        self._cells = [Cell(i) for i in range(size)]
        self._free = [c.at for c in self._cells]

    def new_cell(self) -> Cell:
        if not self._free:
            raise SlabFull
        return self._cells[self._free.pop()]

    def free_cell(self, cell: Cell) -> None:
        cell.clear()
        self._free.append(cell.at)


@dataclass(order=True)
class Timer:
    when: float
    seq: int
    fire: Callable[[float], None] = field(compare=False)


class TimerQueue:
    def __init__(self) -> None:
        self._heap: List[Timer] = []
        self._seq = 0

    def at(self, when: float, fire: Callable[[float], None]) -> None:
        self._seq += 1
        heapq.heappush(self._heap, Timer(when, self._seq, fire))

    def advance(self, watermark: float) -> int:
        fired = 0
        while self._heap and self._heap[0].when <= watermark:
            timer = heapq.heappop(self._heap)
            timer.fire(watermark)
            fired += 1
        return fired


class Operator(abc.ABC):
    def __init__(self, slab: CellSlab, timers: TimerQueue, emit: Callable[[Any, float], None]) -> None:
        self.slab = slab
        self.timers = timers
        self.emit = emit
        self.late = 0

    @abc.abstractmethod
    def on_event(self, key: str, ts: float, value: float) -> None: ...

    def merged(self, a: Cell, b: Cell) -> Cell:
        """A new cell with the sum of both; the caller owns it."""
        out = self.slab.new_cell()  # clean: handed on
        for src in (a, b):
            out.count += src.count
            out.total += src.total
            out.lo, out.hi = min(out.lo, src.lo), max(out.hi, src.hi)
        return out


class Tumbling(Operator):
    width = 60.0

    def __init__(self, slab, timers, emit) -> None:
        super().__init__(slab, timers, emit)
        self.open: Dict[Tuple[str, float], Cell] = {}

    def on_event(self, key: str, ts: float, value: float) -> None:
        start = ts - ts % self.width
        cell = self.open.get((key, start))
        if cell is None:
            cell = self.slab.new_cell()  # clean: near miss, the timer set below fires _close
            self.open[(key, start)] = cell
            self.timers.at(start + self.width, lambda _wm, k=key, s=start: self._close(k, s))
        cell.add(value)

    def _close(self, key: str, start: float) -> None:
        cell = self.open.pop((key, start), None)
        if cell is None:
            return
        self.emit(key, cell.total)
        self.slab.free_cell(cell)

    def pair_mean(self, key: str, first: float, second: float) -> float:
        a, b = self.open.get((key, first)), self.open.get((key, second))
        if a is None or b is None:
            return 0.0
        both = self.merged(a, b)  # leak: the return for an empty sum keeps the cell
        if both.count == 0:
            return 0.0
        mean = both.total / both.count
        self.slab.free_cell(both)
        return mean

    def pair_count(self, key: str, first: float, second: float) -> int:
        a, b = self.open.get((key, first)), self.open.get((key, second))
        if a is None or b is None:
            return 0
        return self.merged(a, b).count  # leak: the merged cell is dropped after one field


class Sessions(Operator):
    """Windows that grow while events are less than gap apart."""

    gap = 30.0

    def __init__(self, slab, timers, emit) -> None:
        super().__init__(slab, timers, emit)
        self.live: Dict[str, Tuple[float, Cell]] = {}

    def on_event(self, key: str, ts: float, value: float) -> None:
        entry = self.live.get(key)
        if entry is None:
            cell = self.slab.new_cell()  # clean: near miss, stays in live until expire()
        elif ts - entry[0] > self.gap:
            self.emit(key, entry[1].total)
            self.slab.free_cell(entry[1])
            cell = self.slab.new_cell()  # clean: the one before was freed above
        else:
            cell = entry[1]
        cell.add(value)
        self.live[key] = (ts, cell)

    def expire(self, watermark: float) -> None:
        for key in [k for k, (ts, _) in self.live.items() if ts + self.gap < watermark]:
            _, cell = self.live.pop(key)
            self.emit(key, cell.total)
            self.slab.free_cell(cell)

    def join_keys(self, into: str, other: str) -> bool:
        """Two keys turn out to be the same user."""
        a, b = self.live.get(into), self.live.get(other)
        if a is None or b is None:
            return False
        both = self.merged(a[1], b[1])  # clean: near miss, replaces both, which are freed
        self.slab.free_cell(a[1])
        self.slab.free_cell(b[1])
        del self.live[other]
        self.live[into] = (max(a[0], b[0]), both)
        return True


class Sliding(Operator):
    """Ring of panes per key."""

    panes = 4
    pane = 15.0

    def __init__(self, slab, timers, emit) -> None:
        super().__init__(slab, timers, emit)
        self.rings: Dict[str, List[Cell]] = {}
        self.newest: Dict[str, float] = {}

    def on_event(self, key: str, ts: float, value: float) -> None:
        start = ts - ts % self.pane
        ring = self.rings.setdefault(key, [])
        if start > self.newest.get(key, -1.0):
            ring.append(self.slab.new_cell())  # leak: the pane sliced off the front is never freed
            self.rings[key] = ring = ring[-self.panes:]
            self.newest[key] = start
        elif start < self.newest[key]:
            self.late += 1
            return
        ring[-1].add(value)

    def total(self, key: str) -> float:
        return sum(c.total for c in self.rings.get(key, ()))

    def forget(self, key: str) -> None:
        for cell in self.rings.pop(key, []):
            self.slab.free_cell(cell)
        self.newest.pop(key, None)


class Dedup(Operator):
    """Counts duplicates inside a horizon."""

    horizon = 300.0

    def __init__(self, slab, timers, emit) -> None:
        super().__init__(slab, timers, emit)
        self.seen: Dict[str, Cell] = {}

    def on_event(self, key: str, ts: float, value: float) -> None:
        cell = self.slab.new_cell()  # leak: a key seen before keeps its old cell and this one is dropped
        known = self.seen.setdefault(key, cell)
        known.add(value)
        self.timers.at(ts + self.horizon, lambda _wm, k=key: self._drop(k))

    def _drop(self, key: str) -> None:
        cell = self.seen.pop(key, None)
        if cell is not None:
            self.slab.free_cell(cell)


class TopN(Operator):
    """Scratch ranking over a batch; all cells are gone when it returns."""

    def on_event(self, key: str, ts: float, value: float) -> None:
        self.emit(key, value)

    def rank(self, rows: Iterable[Tuple[str, float]], n: int) -> List[str]:
        cells: Dict[str, Cell] = {}
        for key, value in rows:
            if key not in cells:
                cells[key] = self.slab.new_cell()  # clean: the loop at the end frees all
            cells[key].add(value)
        best = sorted(cells, key=lambda k: cells[k].total, reverse=True)[:n]
        for cell in cells.values():
            self.slab.free_cell(cell)
        return best

    def rank_above(self, rows: Iterable[Tuple[str, float]], floor: float) -> List[str]:
        cells: Dict[str, Cell] = {}
        for key, value in rows:
            if key not in cells:
                cells[key] = self.slab.new_cell()  # leak: cells at or below the floor are not freed
            cells[key].add(value)
        best = [k for k, c in cells.items() if c.total > floor]
        for k in best:
            self.slab.free_cell(cells[k])
        return best

    def running(self, rows: Iterable[Tuple[str, float]]) -> Iterator[float]:
        cell = self.slab.new_cell()  # clean: freed in finally, however the consumer ends
        try:
            for _, value in rows:
                cell.add(value)
                yield cell.total
        finally:
            self.slab.free_cell(cell)
