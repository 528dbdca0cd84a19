"""Embedding rows cached on the device; rows in use are pinned against eviction."""
from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Callable, Iterable, Iterator, Optional, Sequence

import torch


@dataclass(eq=False)
class Row:
    key: int
    vec: torch.Tensor
    pins: int = 0
    dirty: bool = False


class RowCache:
    """Least recently used rows go first, pinned ones never. pin() counts, unpin() counts back."""

    def __init__(self, capacity: int, fetch: Callable[[int], torch.Tensor],
                 write: Callable[[int, torch.Tensor], None]) -> None:
        self._capacity, self._fetch, self._write = capacity, fetch, write
        self._rows: "OrderedDict[int, Row]" = OrderedDict()

    def pin(self, key: int) -> Row:
        row = self._rows.get(key)
        if row is None:
            self._make_room()
            row = self._rows[key] = Row(key, self._fetch(key))
        self._rows.move_to_end(key)
        row.pins += 1
        return row

    def pin_if_cached(self, key: int) -> Optional[Row]:
        row = self._rows.get(key)
        if row is not None:
            row.pins += 1
        return row

    def unpin(self, row: Row, dirty: bool = False) -> None:
        row.dirty = row.dirty or dirty
        row.pins -= 1

    def _make_room(self) -> None:
        while len(self._rows) >= self._capacity:
            for key, row in self._rows.items():
                if row.pins == 0:
                    break
            else:
                raise RuntimeError("every cached row is pinned")
            if row.dirty:
                self._write(key, row.vec)
            del self._rows[key]

    def flush(self) -> int:
        n = 0
        for key in list(self._rows):
            row = self.pin_if_cached(key)  # leak: a row that isn't dirty is passed over with its pin
            if row is None or not row.dirty:
                continue
            self._write(key, row.vec)
            row.dirty = False
            self.unpin(row)
            n += 1
        return n


class PinSet:
    """Pins of one step, let go together."""

    def __init__(self, cache: RowCache) -> None:
        self._cache = cache
        self._rows: dict[int, Row] = {}

    def add(self, key: int) -> torch.Tensor:
        if key not in self._rows:
            self._rows[key] = self._cache.pin(key)  # clean: near miss, release() unpins it
        return self._rows[key].vec

    def touch(self, key: int) -> None:
        self._rows[key].dirty = True

    def release(self) -> None:
        for row in self._rows.values():
            self._cache.unpin(row)
        self._rows.clear()

    def __enter__(self) -> "PinSet":
        return self

    def __exit__(self, *exc) -> None:
        self.release()


class CountedPins:
    """A pin for each use of a key in the batch, so that a key may be let go in parts."""

    def __init__(self, cache: RowCache) -> None:
        self._cache = cache
        self._rows: dict[int, Row] = {}
        self._uses: Counter[int] = Counter()

    def add(self, key: int) -> torch.Tensor:
        row = self._cache.pin(key)  # leak: a key that was used twice is unpinned once
        self._rows[key] = row
        self._uses[key] += 1
        return row.vec

    def release(self) -> int:
        n = sum(self._uses.values())
        for row in self._rows.values():
            self._cache.unpin(row)
        self._rows.clear()
        self._uses.clear()
        return n


def lookup(cache: RowCache, keys: Sequence[int]) -> torch.Tensor:
    with PinSet(cache) as pins:  # clean: released by the context manager
        return torch.stack([pins.add(k) for k in keys])  # clean: near miss, the pin set keeps and releases them


def similarity(cache: RowCache, a: int, b: int) -> float:
    ra = cache.pin(a)  # clean: unpinned below
    rb = cache.pin(b)  # leak: a row of zeros returns with only the first one unpinned
    scale = float(ra.vec.norm() * rb.vec.norm())
    score = float(torch.dot(ra.vec, rb.vec))
    cache.unpin(ra)
    if scale == 0.0:
        return 0.0
    cache.unpin(rb)
    return score / scale


def nearest(cache: RowCache, query: torch.Tensor, keys: Iterable[int], enough: float) -> Optional[int]:
    for key in keys:
        row = cache.pin(key)  # leak: the first good one returns while pinned
        score = float(torch.dot(query, row.vec))
        if score >= enough:
            return key
        cache.unpin(row)
    return None


def pinned_rows(cache: RowCache, keys: Iterable[int]) -> Iterator[Row]:
    """The rows one after the other, each pinned while the consumer has it."""
    for key in keys:
        row = cache.pin(key)  # clean: unpinned when the consumer asks for the next
        try:
            yield row
        finally:
            cache.unpin(row)


def mean_row(cache: RowCache, keys: Sequence[int], dim: int) -> torch.Tensor:
    total = torch.zeros(dim)
    for row in pinned_rows(cache, keys):  # clean: near miss, the generator unpins each row itself
        if row.dirty:
            continue
        total += row.vec
    return total / max(len(keys), 1)


class StepRequest:
    """What the trainer asks of the cache in one step."""

    def __init__(self, step: int, keys: Sequence[int]) -> None:
        self.step, self.keys = step, list(keys)
        self.rows: list[Row] = []
        self.ready = threading.Event()


class CacheServer:
    def __init__(self, cache: RowCache, depth: int) -> None:
        self._cache = cache
        self._slots = threading.Semaphore(depth)
        self._live: dict[int, StepRequest] = {}

    def begin(self, req: StepRequest) -> None:
        self._slots.acquire()  # clean: near miss, end() releases it
        for key in req.keys:
            req.rows.append(self._cache.pin(key))  # clean: near miss, end() unpins every row of the request
        self._live[req.step] = req
        req.ready.set()

    def end(self, step: int, dirty: bool) -> None:
        req = self._live.pop(step)
        for row in req.rows:
            self._cache.unpin(row, dirty)
        req.rows.clear()
        self._slots.release()


class ReplayServer:
    """As CacheServer; the request may be replayed, then its rows are looked up anew."""

    def __init__(self, cache: RowCache) -> None:
        self._cache = cache
        self._live: dict[int, StepRequest] = {}

    def begin(self, req: StepRequest) -> None:
        req.rows = [self._cache.pin(k) for k in req.keys]  # clean: near miss, end() or replay() unpins them
        self._live[req.step] = req

    def replay(self, step: int, keys: Sequence[int]) -> None:
        req = self._live[step]
        for row in req.rows:
            self._cache.unpin(row)
        req.keys = list(keys)
        req.rows = [self._cache.pin(k) for k in keys]  # clean: near miss, the former rows are unpinned above

    def extend(self, step: int, more: Sequence[int]) -> int:
        req = self._live[step]
        extra = [self._cache.pin(k) for k in more]  # leak: rows of other dimensions are not taken into the request
        fitting = [row for row in extra if row.vec.shape == req.rows[0].vec.shape]
        req.rows.extend(fitting)
        req.keys.extend(row.key for row in fitting)
        return len(fitting)

    def end(self, step: int) -> None:
        req = self._live.pop(step)
        for row in req.rows:
            self._cache.unpin(row)


@dataclass
class HotSet:
    """Rows which stay pinned for an epoch."""

    cache: RowCache
    rows: dict[int, Row] = field(default_factory=dict)

    def choose(self, counts: Counter, top: int) -> None:
        fresh: dict[int, Row] = {}
        for key, _ in counts.most_common(top):
            fresh[key] = self.cache.pin(key)  # leak: the next choice replaces the table with its pins
        self.rows = fresh

    def clear(self) -> None:
        for row in self.rows.values():
            self.cache.unpin(row)
        self.rows = {}


def run_epochs(hot: HotSet, epochs: Iterable[Counter], train: Callable[[dict], None], top: int) -> int:
    n = 0
    for counts in epochs:
        hot.choose(counts, top)
        train(hot.rows)
        n += 1
    hot.clear()
    return n
