"""Micro-batch buffers produced and consumed through generators."""
from __future__ import annotations

import queue
from typing import Iterable, Iterator, List, Optional, Tuple

import torch


class BatchBuffers:
    def __init__(self, rows: int, cols: int, depth: int):
        self._ready: "queue.SimpleQueue[torch.Tensor]" = queue.SimpleQueue()
        for _ in range(depth):
            self._ready.put(torch.zeros(rows, cols, dtype=torch.int64))

    def borrow(self) -> torch.Tensor:
        return self._ready.get()  # clean: handed to the caller

    def try_borrow(self) -> Optional[torch.Tensor]:
        try:
            return self._ready.get_nowait()  # clean: near miss, the handler runs only when nothing was taken
        except queue.Empty:
            return None

    def hand_back(self, buf: torch.Tensor) -> None:
        self._ready.put(buf)


def fill(buf: torch.Tensor, ids: List[int]) -> int:
    n = min(buf.shape[1], len(ids))
    buf[0, :n] = torch.tensor(ids[:n])
    return n


def stream(pool: BatchBuffers, docs: Iterable[List[int]]) -> Iterator[torch.Tensor]:
    """Yields a buffer that is valid until the next step."""
    for doc in docs:
        buf = pool.borrow()  # clean: near miss, finally gives it back on resumption and on close
        try:
            fill(buf, doc)
            yield buf
        finally:
            pool.hand_back(buf)


def stream_nonempty(pool: BatchBuffers, docs: Iterable[List[int]]) -> Iterator[torch.Tensor]:
    """Yields a buffer that is valid until the next step."""
    for doc in docs:
        buf = pool.borrow()  # leak: the continue for an empty document skips hand_back
        n = fill(buf, doc)
        if n == 0:
            continue
        try:
            yield buf
        finally:
            pool.hand_back(buf)


def owned_stream(pool: BatchBuffers, docs: Iterable[List[int]]) -> Iterator[torch.Tensor]:
    """Each buffer that is yielded belongs to the consumer."""
    for doc in docs:
        buf = pool.borrow()  # clean: near miss, an empty document gives it back, else the consumer owns it
        if fill(buf, doc) == 0:
            pool.hand_back(buf)
            continue
        yield buf


def token_total(pool: BatchBuffers, docs: Iterable[List[int]]) -> int:
    total = 0
    for buf in owned_stream(pool, docs):  # clean: every buffer is given back in the body
        total += int((buf[0] != 0).sum())
        pool.hand_back(buf)
    return total


def longest(pool: BatchBuffers, docs: Iterable[List[int]]) -> int:
    best = 0
    for buf in owned_stream(pool, docs):  # leak: the buffer that ends the search at a full row is not given back
        used = int((buf[0] != 0).sum())
        if used == buf.shape[1]:
            return used
        best = max(best, used)
        pool.hand_back(buf)
    return best


def lookahead(pool: BatchBuffers, docs: Iterable[List[int]]) -> Iterator[Tuple[torch.Tensor, bool]]:
    """Yields (buffer, is_last); buffers belong to the consumer."""
    held: Optional[torch.Tensor] = None
    for doc in docs:
        buf = pool.borrow()  # clean: near miss, the held one is yielded before it is replaced, the last one after the loop
        fill(buf, doc)
        if held is not None:
            yield held, False
        held = buf
    if held is not None:
        yield held, True


def pairs(pool: BatchBuffers, docs: Iterable[List[int]]) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
    """Yields consecutive pairs; buffers belong to the consumer."""
    held: Optional[torch.Tensor] = None
    for doc in docs:
        buf = pool.borrow()  # leak: with an odd number of documents the last held buffer is never yielded
        fill(buf, doc)
        if held is None:
            held = buf
            continue
        yield held, buf
        held = None


class Packer:
    """Packs short documents into one row after another."""

    def __init__(self, pool: BatchBuffers):
        self.pool = pool
        self.current: Optional[torch.Tensor] = None
        self.col = 0

    def add(self, doc: List[int]) -> Optional[torch.Tensor]:
        """A full buffer for the caller, else None."""
        full = None
        if self.current is None:
            self.current = self.pool.borrow()  # clean: near miss, only when the field is None, flush gives it back
            self.col = 0
        elif self.col + len(doc) > self.current.shape[1]:
            full = self.current
            self.current = self.pool.borrow()  # clean: near miss, the overwritten buffer is returned as full
            self.col = 0
        self.current[0, self.col : self.col + len(doc)] = torch.tensor(doc)
        self.col += len(doc)
        return full

    def reset(self, doc: List[int]) -> None:
        self.current = self.pool.borrow()  # leak: overwrites a current buffer which was not given back
        self.col = fill(self.current, doc)

    def pack_all(self, docs: Iterable[List[int]]) -> int:
        rows = 0
        for doc in docs:
            full = self.add(doc)  # leak: a full buffer is counted and dropped
            if full is not None:
                rows += 1
        return rows

    def pack_into(self, docs: Iterable[List[int]], out: torch.Tensor) -> int:
        rows = 0
        for doc in docs:
            full = self.add(doc)  # clean: near miss, None needs nothing and a full one is copied and given back
            if full is None:
                continue
            out[rows].copy_(full[0])
            self.pool.hand_back(full)
            rows += 1
        return rows

    def flush(self) -> None:
        if self.current is not None:
            self.pool.hand_back(self.current)
            self.current = None
