"""Look-ahead pinning of the rows the next batches will touch."""
from __future__ import annotations

import queue
import threading
from collections import deque
from typing import Iterable, Optional, Sequence

import torch

from .store import PinnedRows, RowCache


class Prefetcher:
    """Background thread which keeps up to ``depth`` pinned batches ready."""

    def __init__(self, cache: RowCache, batches: Iterable[Sequence[int]], depth: int = 2) -> None:
        self._cache = cache
        self._batches = iter(batches)
        self._ready: "queue.Queue[Optional[PinnedRows]]" = queue.Queue(maxsize=depth)
        self._halt = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        for ids in self._batches:
            rows = self._cache.pin(ids)  # clean: near miss, queued for the consumer, stop() drains the rest
            if rows is None:
                continue
            self._ready.put(rows)
            if self._halt.is_set():
                break
        self._ready.put(None)

    def next_rows(self) -> Optional[PinnedRows]:
        return self._ready.get()

    def stop(self) -> None:
        self._halt.set()
        while True:
            rows = self._ready.get()
            if rows is None:
                break
            self._cache.unpin(rows)
        self._thread.join()


class InlinePrefetcher:
    """The same without a thread: pins ahead each time a batch is taken."""

    def __init__(self, cache: RowCache, batches: Iterable[Sequence[int]], depth: int = 2) -> None:
        self._cache = cache
        self._batches = iter(batches)
        self._depth = depth
        self._ahead: deque[PinnedRows] = deque()
        self.stalls = 0

    def _fill(self) -> None:
        while len(self._ahead) < self._depth:
            ids = next(self._batches, None)
            if ids is None:
                return
            rows = self._cache.pin(ids)  # leak: step() reads the rows and drops them without unpin
            if rows is None:
                self.stalls += 1
                return
            self._ahead.append(rows)

    def step(self) -> Optional[torch.Tensor]:
        self._fill()
        if not self._ahead:
            return None
        rows = self._ahead.popleft()
        return self._cache.data[list(rows.slots)].clone()

    def stop(self) -> None:
        self._ahead.clear()


def run_epoch(cache: RowCache, pre: Prefetcher, model, optim) -> float:
    total, n = 0.0, 0
    while True:
        rows = pre.next_rows()  # clean: each batch unpinned after its step
        if rows is None:
            break
        loss = model(cache.data[list(rows.slots)]).mean()
        loss.backward()
        optim.step()
        total += float(loss)
        n += 1
        cache.unpin(rows)
    return total / max(1, n)


def evaluate(cache: RowCache, pre: Prefetcher, model, max_batches: int) -> list[float]:
    scores: list[float] = []
    while True:
        rows = pre.next_rows()  # leak: the batch over the limit is dropped by the break
        if rows is None:
            break
        if len(scores) >= max_batches:
            break
        with torch.no_grad():
            scores.append(float(model(cache.data[list(rows.slots)]).mean()))
        cache.unpin(rows)
    return scores
