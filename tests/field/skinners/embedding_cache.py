"""Device cache of embedding rows over a host table.

Rows used by a step are pinned, a pinned row is not evicted. Writers take a row exclusively.
"""
from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Optional, Sequence, Set

import torch

log = logging.getLogger(__name__)


@dataclass
class Row:
    key: int
    line: int
    pins: int = 0
    dirty: bool = False
    writer: threading.Lock = field(default_factory=threading.Lock)


class RowCache:
    def __init__(self, host: torch.Tensor, lines: int):
        self.host = host
        self.device = torch.empty(lines, host.shape[1], device="cuda")
        self._rows: "OrderedDict[int, Row]" = OrderedDict()
        self._lines = list(range(lines))
        self._mu = threading.RLock()
        self.hits = Counter()

    def _line(self) -> Optional[int]:
        if self._lines:
            return self._lines.pop()
        for key, row in self._rows.items():
            if row.pins == 0:
                if row.dirty:
                    self.host[key].copy_(self.device[row.line])
                del self._rows[key]
                return row.line
        return None

    def pin(self, key: int) -> Optional[Row]:
        with self._mu:
            row = self._rows.get(key)
            if row is None:
                line = self._line()  # clean: near miss, kept by the row that enters the table
                if line is None:
                    return None
                row = self._rows[key] = Row(key, line)
                self.device[line].copy_(self.host[key], non_blocking=True)
            self._rows.move_to_end(key)
            row.pins += 1
            self.hits[key] += 1
            return row

    def unpin(self, row: Row) -> None:
        with self._mu:
            row.pins -= 1

    def drop(self, key: int) -> bool:
        """Remove a row that nobody uses."""
        with self._mu:
            row = self._rows.get(key)
            if row is None or row.pins:
                return False
            del self._rows[key]
            self._lines.append(row.line)
            return True

    def preload(self, keys: Iterable[int]) -> int:
        loaded = 0
        with self._mu:
            for key in keys:
                line = self._line()  # leak: a key that is resident skips the entry and the line is lost
                if line is None:
                    break
                if key in self._rows:
                    continue
                self.device[line].copy_(self.host[key])
                self._rows[key] = Row(key, line)
                loaded += 1
        return loaded

    def resident(self) -> Set[int]:
        with self._mu:
            return set(self._rows)


class StepView:
    """The rows of one step; pinned at lookup, unpinned when the optimizer is through."""

    def __init__(self, cache: RowCache):
        self.cache = cache
        self.rows: Dict[int, Row] = {}
        self.cold: Dict[int, Row] = {}

    def lookup(self, keys: Sequence[int]) -> torch.Tensor:
        lines = []
        for key in keys:
            row = self.rows.get(key)
            if row is None:
                row = self.cache.pin(key)  # clean: near miss, end unpins the rows of the step
                if row is None:
                    lines.append(0)
                    continue
                self.rows[key] = row
            lines.append(row.line)
        return self.cache.device[torch.tensor(lines)]

    def lookup_cold(self, keys: Sequence[int]) -> List[int]:
        found = []
        for key in keys:
            if key in self.cold:
                continue
            row = self.cache.pin(key)  # leak: end unpins only cold rows that are dirty
            if row is not None:
                self.cold[key] = row
                found.append(key)
        return found

    def end(self) -> None:
        for row in self.rows.values():
            self.cache.unpin(row)
        self.rows = {}
        for row in self.cold.values():
            if row.dirty:
                self.cache.unpin(row)
        self.cold = {}


class StepGuard:
    def __init__(self, cache: RowCache, keys: Sequence[int]):
        self._cache = cache
        self._keys = keys
        self._taken: List[Row] = []

    def __enter__(self) -> List[Row]:
        for key in self._keys:
            row = self._cache.pin(key)  # clean: unpinned by __exit__
            if row is not None:
                self._taken.append(row)
        return self._taken

    def __exit__(self, *exc) -> bool:
        while self._taken:
            self._cache.unpin(self._taken.pop())
        return False


def mean_row(cache: RowCache, keys: Sequence[int]) -> Optional[torch.Tensor]:
    with StepGuard(cache, keys) as rows:  # clean: with block, the returns inside it are covered
        if not rows:
            return None
        return cache.device[torch.tensor([r.line for r in rows])].mean(0)


def nearest(cache: RowCache, query: torch.Tensor, keys: Iterable[int]) -> Optional[int]:
    best: Optional[Row] = None
    best_score = float("-inf")
    for key in keys:
        row = cache.pin(key)  # clean: near miss, the loser is unpinned in the loop, the winner after it
        if row is None:
            continue
        score = float(torch.dot(query, cache.device[row.line]))
        if score > best_score:
            if best is not None:
                cache.unpin(best)
            best, best_score = row, score
        else:
            cache.unpin(row)
    if best is None:
        return None
    cache.unpin(best)
    return best.key


def hottest(cache: RowCache, count: int) -> List[Row]:
    """The hottest rows, pinned; the caller unpins them."""
    rows = []
    for key, _ in cache.hits.most_common(count):
        row = cache.pin(key)  # clean: handed to the caller
        if row is not None:
            rows.append(row)
    return rows


def export_hot(cache: RowCache, count: int) -> torch.Tensor:
    rows = hottest(cache, count)  # clean: all unpinned below
    out = cache.device[torch.tensor([r.line for r in rows])].cpu()
    for row in rows:
        cache.unpin(row)
    return out


def hot_keys(cache: RowCache, count: int) -> List[int]:
    return sorted(row.key for row in hottest(cache, count))  # leak: the keys are kept, the pins forgotten


def refresh_hot(cache: RowCache, count: int, limit: int) -> int:
    refreshed = 0
    for row in hottest(cache, count):  # leak: the break at the limit leaves the other rows pinned
        if refreshed >= limit:
            break
        cache.device[row.line].copy_(cache.host[row.key])
        refreshed += 1
        cache.unpin(row)
    return refreshed


class RowWriter:
    """Exclusive update of rows."""

    def __init__(self, cache: RowCache, lr: float):
        self.cache = cache
        self.lr = lr
        self._frozen: Set[int] = set()

    def freeze(self, keys: Iterable[int]) -> None:
        self._frozen.update(keys)

    def apply(self, key: int, grad: torch.Tensor) -> bool:
        row = self.cache.pin(key)  # clean: unpinned on every way on
        if row is None:
            return False
        row.writer.acquire()  # leak: a frozen row returns with its writer lock taken
        if key in self._frozen:
            self.cache.unpin(row)
            return False
        self.cache.device[row.line].sub_(grad, alpha=self.lr)
        row.dirty = True
        row.writer.release()
        self.cache.unpin(row)
        return True

    @contextmanager
    def exclusive(self, key: int):
        row = self.cache.pin(key)  # leak: the generator ends without unpin
        row.writer.acquire()  # clean: released in finally
        try:
            yield self.cache.device[row.line]
        finally:
            row.dirty = True
            row.writer.release()

    def zero(self, key: int) -> None:
        with self.exclusive(key) as data:  # clean: with block, the pin is the manager's own
            data.zero_()
