"""The consumer side: batches in order, cells recycled when a batch has been used."""
from __future__ import annotations

import pickle
import queue
from typing import Any, Iterator, Optional

from .ring import Cell, ShmRing
from .worker import fill_cell


class Batch:
    def __init__(self, ring: ShmRing, cell: Cell) -> None:
        self._ring = ring
        self._cell: Optional[Cell] = cell

    def samples(self) -> list[Any]:
        return pickle.loads(self._cell.read())

    def done(self) -> None:
        if self._cell is not None:
            self._ring.recycle(self._cell)
            self._cell = None

    def __enter__(self) -> "Batch":
        return self

    def __exit__(self, *exc) -> None:
        self.done()


class ShmLoader:
    def __init__(self, ring: ShmRing, results, batches: int) -> None:
        self._ring, self._results, self._batches = ring, results, batches
        self._early: dict[int, Batch] = {}

    def _next(self, want: int) -> Batch:
        while want not in self._early:
            no, number, used = self._results.get()
            self._early[no] = Batch(self._ring, self._ring.attach(number, used))  # clean: near miss, waits in _early
        return self._early.pop(want)

    def __iter__(self) -> Iterator[list[Any]]:
        for want in range(self._batches):
            with self._next(want) as batch:  # clean: Batch.__exit__ recycles the cell
                yield batch.samples()

    def peek(self) -> int:
        """How many samples the first batch has; that batch stays the first."""
        batch = self._next(0)  # clean: near miss, put back into the table
        self._early[0] = batch
        return len(batch.samples())

    def skip(self, upto: int) -> int:
        """Passes over the batches before `upto`, for a resumed run."""
        skipped = 0
        for want in range(upto):
            batch = self._next(want)  # leak: a skipped batch is never done
            skipped += len(batch.samples())
        return skipped

    def shutdown(self) -> None:
        for batch in self._early.values():
            batch.done()
        self._early.clear()
        while True:
            try:
                no, number, used = self._results.get_nowait()
            except queue.Empty:
                return
            cell = self._ring.attach(number, used)  # clean: recycled in the next line
            self._ring.recycle(cell)


class InlineLoader:
    """Without workers: one batch is prefetched into a cell of its own."""

    def __init__(self, ring: ShmRing, dataset, batch_size: int) -> None:
        self._ring, self._dataset, self._size = ring, dataset, batch_size
        self._ahead: Optional[Batch] = None
        self._at = 0

    def _prefetch(self) -> None:
        ids = range(self._at, min(self._at + self._size, len(self._dataset)))
        self._at += self._size
        samples = [self._dataset[i] for i in ids]
        cell = fill_cell(self._ring, samples)  # leak: rewind clears the batch ahead without done
        self._ahead = Batch(self._ring, cell)

    def next(self) -> list[Any]:
        if self._ahead is None:
            self._prefetch()
        samples = self._ahead.samples()
        self._ahead.done()
        self._ahead = None
        if self._at < len(self._dataset):
            self._prefetch()
        return samples

    def rewind(self) -> None:
        self._ahead = None
        self._at = 0

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.done()
            self._ahead = None
