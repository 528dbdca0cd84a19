"""Data loader that fills pinned rows from a deque and yields them to the trainer."""
from __future__ import annotations

import collections
import contextlib
import random
import threading
from typing import Iterable, Iterator, Optional

import torch

Row = torch.Tensor

class RowRack:
    """Pinned rows; lend() blocks, peekable lend_now() does not."""

    def __init__(self, rows: int, seqlen: int) -> None:
        self._rows: collections.deque[Row] = collections.deque(
            torch.empty(seqlen, dtype=torch.int32, pin_memory=True) for _ in range(rows)
        )
        self._cv = threading.Condition()
        self.poisoned = False

    def lend(self) -> Row:
        with self._cv:
            while not self._rows:
                self._cv.wait()
            return self._rows.popleft()

    def lend_now(self) -> Optional[Row]:
        with self._cv:
            return self._rows.popleft() if self._rows else None

    def lend_warm(self) -> Optional[Row]:
        """The most recently used row, still in cache."""
        with self._cv:
            if not self._rows:
                return None
            row = self._rows.pop()  # leak: poisoned rack returns None after popping
            if self.poisoned:
                return None
            return row

    def lend_exact(self, seqlen: int) -> Optional[Row]:
        with self._cv:
            for _ in range(len(self._rows)):
                row = self._rows.popleft()  # clean: near miss, a misfit is appended back
                if row.numel() == seqlen:
                    return row
                self._rows.append(row)
        return None

    def give(self, row: Row) -> None:
        with self._cv:
            self._rows.append(row)
            self._cv.notify()

def fill(row: Row, doc: list[int]) -> int:
    n = min(len(doc), row.numel())
    row[:n] = torch.tensor(doc[:n], dtype=torch.int32)
    return n

def stream(rack: RowRack, docs: Iterable[list[int]]) -> Iterator[Row]:
    """Each row is valid until the next one is asked for."""
    for doc in docs:
        row = rack.lend()  # clean: near miss, finally gives it after the consumer resumes
        try:
            fill(row, doc)
            yield row
        finally:
            rack.give(row)

def stream_filtered(rack: RowRack, docs: Iterable[list[int]], min_len: int) -> Iterator[Row]:
    """Rows pass to the consumer, who gives them back."""
    for doc in docs:
        row = rack.lend()  # leak: short documents continue with the row lost
        if fill(row, doc) < min_len:
            continue
        yield row

def stream_reused(rack: RowRack, docs: Iterable[list[int]], min_len: int) -> Iterator[Row]:
    row = None
    for doc in docs:
        if row is None:
            row = rack.lend()  # clean: near miss, reused until yielded, rest given at end
        if fill(row, doc) < min_len:
            continue
        out, row = row, None
        yield out
    if row is not None:
        rack.give(row)

@contextlib.contextmanager
def two_rows(rack: RowRack) -> Iterator[tuple[Row, Row]]:
    a = rack.lend()  # clean: outer finally gives it
    try:
        b = rack.lend()  # clean: inner finally gives it
        try:
            yield a, b
        finally:
            rack.give(b)
    finally:
        rack.give(a)

def mix(rack: RowRack, left: list[int], right: list[int], p: float) -> torch.Tensor:
    with two_rows(rack) as (a, b):  # clean: context manager gives both
        fill(a, left)
        fill(b, right)
        pick = torch.rand(a.numel()) < p
        return torch.where(pick, a, b).cuda()

def shuffle_window(rack: RowRack, docs: Iterable[list[int]], width: int) -> Iterator[torch.Tensor]:
    window: list[Row] = []
    for doc in docs:
        row = rack.lend()  # leak: rows left in the window are never given
        fill(row, doc)
        window.append(row)
        if len(window) == width:
            pick = window.pop(random.randrange(width))
            yield pick.cuda()
            rack.give(pick)

def shuffle_drained(rack: RowRack, docs: Iterable[list[int]], width: int) -> Iterator[torch.Tensor]:
    window: list[Row] = []
    for doc in docs:
        row = rack.lend()  # clean: near miss, tail loop drains the window
        fill(row, doc)
        window.append(row)
        if len(window) == width:
            pick = window.pop(random.randrange(width))
            dev = pick.cuda()
            rack.give(pick)
            yield dev
    while window:
        pick = window.pop()
        dev = pick.cuda()
        rack.give(pick)
        yield dev

def pack_tail(rack: RowRack, docs: list[list[int]]) -> Optional[torch.Tensor]:
    row = rack.lend_now()  # clean: given on both returns; None means nothing lent
    if row is None:
        return None
    used = 0
    for doc in docs:
        if used + len(doc) > row.numel():
            break
        row[used: used + len(doc)] = torch.tensor(doc, dtype=torch.int32)
        used += len(doc)
    res = row[:used].cuda() if used else None
    rack.give(row)
    return res

def warm_prefix(rack: RowRack, doc: list[int]) -> torch.Tensor:
    row = rack.lend_warm()  # leak: only the cuda copy survives
    if row is None:
        row = rack.lend()  # leak: same, the fallback row is dropped after the copy
    fill(row, doc)
    return row.cuda()
