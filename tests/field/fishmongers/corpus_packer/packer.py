"""Best fit packing with a handful of open rows."""
from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from .buffers import BufferPool, PoolDry, RowBuffer

Emit = Callable[[RowBuffer], None]


class Packer:
    """`emit` gets each full row and has to hand it back to the pool."""

    def __init__(self, pool: BufferPool, emit: Emit, open_rows: int = 8) -> None:
        self._pool = pool
        self._emit = emit
        self._limit = open_rows
        self._open: list[RowBuffer] = []
        self.documents = 0

    def add(self, tokens: np.ndarray) -> None:
        self.documents += 1
        fitting = [row for row in self._open if row.room() >= len(tokens)]
        if fitting:
            row = min(fitting, key=RowBuffer.room)
        else:
            if len(self._open) >= self._limit:
                fullest = min(self._open, key=RowBuffer.room)
                self._open.remove(fullest)
                self._emit(fullest)
            row = self._pool.rent()  # leak: close() emits the rows that are at least half full and drops the others
            self._open.append(row)
        row.append(tokens)
        if row.room() == 0:
            self._open.remove(row)
            self._emit(row)

    def add_long(self, tokens: np.ndarray) -> None:
        """Documents longer than a row get rows of their own."""
        for start in range(0, len(tokens), self._pool.length):
            row = self._pool.rent()  # clean: emitted at once, and who gets it hands it back
            row.append(tokens[start : start + self._pool.length])
            self._emit(row)

    def close(self, min_fill: float = 0.5) -> None:
        for row in self._open:
            if row.used >= min_fill * self._pool.length:
                self._emit(row)
        self._open = []


def dedup_pairs(pool: BufferPool, docs: Iterable[np.ndarray], same: Callable[[RowBuffer, RowBuffer], bool]) -> int:
    """Counts neighbours that are equal after padding."""
    equal = 0
    previous: RowBuffer | None = None
    try:
        for doc in docs:
            current = pool.rent()  # clean: near miss, becomes `previous`, which is handed back in the next round or the finally
            current.append(doc[: pool.length])
            if previous is not None:
                equal += same(previous, current)
                pool.hand_back(previous)
            previous = current
    finally:
        if previous is not None:
            pool.hand_back(previous)
    return equal


def shuffle_rows(pool: BufferPool, rows: list[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    held: list[RowBuffer] = []
    try:
        for row in rows:
            held.append(pool.rent(wait=0.0))  # leak: a dry pool shuffles without the buffers and does not hand back the ones it has
            held[-1].append(row)
    except PoolDry:
        return [rows[i] for i in rng.permutation(len(rows))]
    order = rng.permutation(len(held))
    out = [held[i].ids[: held[i].used].copy() for i in order]
    for buf in held:
        pool.hand_back(buf)
    return out
