"""Embedding cache of the trainer: rows are pinned in host memory while a step uses them."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Callable, Optional

log = logging.getLogger(__name__)


@dataclass
class Entry:
    key: int
    vector: list[float]
    pins: int = 0
    used_at: int = 0


class RowCache:
    def __init__(self, capacity: int, load: Callable[[int], list[float]]) -> None:
        self._capacity = capacity
        self._load = load
        self._rows: dict[int, Entry] = {}
        self._clock = 0

    def hold(self, key: int) -> Entry:
        self._clock += 1
        entry = self._rows.get(key)
        if entry is None:
            self._evict()
            entry = self._rows[key] = Entry(key, self._load(key))
        entry.pins += 1
        entry.used_at = self._clock
        return entry

    def let_go(self, entry: Entry) -> None:
        entry.pins -= 1

    def _evict(self) -> None:
        if len(self._rows) < self._capacity:
            return
        idle = [e for e in self._rows.values() if e.pins == 0]
        if idle:
            del self._rows[min(idle, key=lambda e: e.used_at).key]


class StepRows:
    """The rows of one training step; subclasses decide what happens at its end."""

    def __init__(self, cache: RowCache) -> None:
        self._cache = cache
        self._held: list[Entry] = []

    def fetch(self, keys: list[int]) -> list[list[float]]:
        for key in keys:
            self._held.append(self._cache.hold(key))  # clean: near miss, end_step() lets every row go
        return [e.vector for e in self._held[-len(keys):]] if keys else []

    def end_step(self) -> None:
        for entry in self._held:
            self._cache.let_go(entry)
        self._held.clear()


class SparseStep(StepRows):
    """Writes the gradients back, then ends the step like its base."""

    def __init__(self, cache: RowCache, lr: float) -> None:
        super().__init__(cache)
        self._lr = lr

    def apply(self, grads: dict[int, list[float]]) -> None:
        for entry in self._held:
            grad = grads.get(entry.key)
            if grad is not None:
                entry.vector = [v - self._lr * g for v, g in zip(entry.vector, grad)]

    def end_step(self) -> None:
        super().end_step()
        log.debug("step ended")


class AccumStep:
    """Accumulates over several micro batches; `flush` ends the accumulation."""

    def __init__(self, cache: RowCache) -> None:
        self._cache = cache
        self._sums: dict[int, list[float]] = {}
        self._entries: dict[int, Entry] = {}

    def add(self, key: int, grad: list[float]) -> None:
        entry = self._cache.hold(key)  # leak: setdefault keeps the first pin of a key, later ones are lost
        self._entries.setdefault(key, entry)
        total = self._sums.setdefault(key, [0.0] * len(grad))
        self._sums[key] = [t + g for t, g in zip(total, grad)]

    def flush(self, lr: float) -> int:
        for key, entry in self._entries.items():
            entry.vector = [v - lr * s for v, s in zip(entry.vector, self._sums[key])]
            self._cache.let_go(entry)
        n = len(self._entries)
        self._entries, self._sums = {}, {}
        return n


class Prefetcher:
    """Holds the rows of coming steps."""

    def __init__(self, cache: RowCache, depth: int) -> None:
        self._cache = cache
        self._ahead: deque[Entry] = deque(maxlen=depth)

    def want(self, key: int) -> None:
        self._ahead.append(self._cache.hold(key))  # leak: a full deque drops its oldest entry with the pin

    def close(self) -> None:
        while self._ahead:
            self._cache.let_go(self._ahead.popleft())


def lookup_or(cache: RowCache, key: int, entry: Optional[Entry] = None) -> float:
    """Norm of a row; a caller that already holds it passes the entry."""
    owned = entry is None
    if owned:
        entry = cache.hold(key)  # clean: near miss, let go under the same flag
    norm = sum(v * v for v in entry.vector) ** 0.5
    if owned:
        cache.let_go(entry)
    return norm


def cosine(cache: RowCache, a: int, b: int) -> float:
    left, right = cache.hold(a).vector, cache.hold(b).vector  # leak: both entries dropped, vectors kept
    dot = sum(x * y for x, y in zip(left, right))
    return dot / (lookup_or(cache, a) * lookup_or(cache, b) or 1.0)
