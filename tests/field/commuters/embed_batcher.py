"""Embedding service: requests are gathered into staging rows of a batch matrix."""
from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Callable, Optional

import torch


@dataclass
class Row:
    number: int
    text: str = ""


@dataclass
class Entry:
    text: str
    future: "asyncio.Future[list[float]]"
    row: Optional[Row] = None


class RowBoard:
    """Rows wait in an asyncio queue."""

    def __init__(self, count: int) -> None:
        self._rows: "asyncio.Queue[Row]" = asyncio.Queue()
        for i in range(count):
            self._rows.put_nowait(Row(i))

    async def take_row(self) -> Row:
        return await self._rows.get()  # clean: the caller's

    def take_row_nowait(self) -> Optional[Row]:
        try:
            return self._rows.get_nowait()  # clean: the caller's
        except asyncio.QueueEmpty:
            return None

    async def take_row_within(self, seconds: float) -> Optional[Row]:
        try:
            return await asyncio.wait_for(self._rows.get(), seconds)  # clean: on a timeout nothing was taken
        except asyncio.TimeoutError:
            return None

    def return_row(self, row: Row) -> None:
        row.text = ""
        self._rows.put_nowait(row)


class Batcher:
    def __init__(self, board: RowBoard, encode: Callable[[list[int]], torch.Tensor], max_batch: int) -> None:
        self.board = board
        self.encode = encode
        self.max_batch = max_batch
        self.entries: list[Entry] = []

    async def embed(self, text: str) -> list[float]:
        entry = Entry(text, asyncio.get_running_loop().create_future())
        entry.row = await self.board.take_row()  # clean: the entry is in entries, flush returns its row
        entry.row.text = text
        self.entries.append(entry)
        if len(self.entries) >= self.max_batch:
            self.flush()
        return await entry.future

    async def embed_soon(self, text: str, seconds: float) -> Optional[list[float]]:
        row = await self.board.take_row_within(seconds)  # leak: blank text is answered with None while the row is out
        if row is None:
            return None
        if not text.strip():
            return None
        row.text = text
        entry = Entry(text, asyncio.get_running_loop().create_future(), row)
        self.entries.append(entry)
        return await entry.future

    def enqueue_many(self, texts: list[str]) -> list[Entry]:
        added: list[Entry] = []
        loop = asyncio.get_running_loop()
        for text in texts:
            row = self.board.take_row_nowait()  # clean: near miss, overlong text has its row returned before the continue
            if row is None:
                break
            if len(text) > 8192:
                self.board.return_row(row)
                continue
            row.text = text
            added.append(Entry(text, loop.create_future(), row))
        self.entries.extend(added)
        return added

    def flush(self) -> int:
        batch, self.entries = self.entries, []
        rows = [e.row.number for e in batch if e.row is not None]
        vectors = self.encode(rows) if rows else torch.empty(0)
        for entry, vec in zip(batch, vectors):
            if not entry.future.cancelled():
                entry.future.set_result(vec.tolist())
        for entry in batch:
            if entry.row is not None:
                self.board.return_row(entry.row)
                entry.row = None
        return len(batch)

    def retarget(self, entry: Entry) -> bool:
        """Give the entry another row, e.g. after the old one was corrupted."""
        row = self.board.take_row_nowait()  # leak: overwrites the row the entry already had
        if row is None:
            return False
        row.text = entry.text
        entry.row = row
        return True

    def cancel(self, entry: Entry) -> None:
        if entry in self.entries:
            self.entries.remove(entry)
        if entry.row is not None:
            self.board.return_row(entry.row)
            entry.row = None
        entry.future.cancel()


async def embed_query_pair(b: Batcher, query: str, passage: str) -> Optional[float]:
    rq = await b.board.take_row()  # leak: not returned when the passage gets no row in time
    rp = await b.board.take_row_within(0.2)  # clean: None or returned together with the query's
    if rp is None:
        return None
    rq.text, rp.text = query, passage
    vq, vp = b.encode([rq.number, rp.number])
    b.board.return_row(rq)
    b.board.return_row(rp)
    return float(vq @ vp)


async def embed_all(b: Batcher, texts: list[str]) -> list[list[float]]:
    out: list[list[float]] = []
    row = await b.board.take_row()  # clean: near miss, one row for all texts and the empty ones only skip the encoding
    for text in texts:
        if not text:
            out.append([])
            continue
        row.text = text
        out.append(b.encode([row.number])[0].tolist())
    b.board.return_row(row)
    return out


async def warm(b: Batcher, n: int) -> int:
    rows = [r for r in (b.board.take_row_nowait() for _ in range(n)) if r is not None]  # clean: all returned after the encode
    b.encode([r.number for r in rows])
    for r in rows:
        b.board.return_row(r)
    return len(rows)


async def longest(b: Batcher, texts: list[str]) -> int:
    best = 0
    for text in texts:
        row = await b.board.take_row()  # leak: reaching the cap breaks out with the row
        row.text = text
        best = max(best, int(b.encode([row.number]).shape[-1]))
        if best >= 4096:
            break
        b.board.return_row(row)
    return best
