"""Device row cache for large embedding tables with prefetch."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Optional

import torch


class RowSlots:
    def __init__(self, n: int) -> None:
        self._free = list(range(n))
        self._reserve = list(range(n, n + max(1, n // 16)))

    def alloc(self) -> int:
        if self._free:
            return self._free.pop()
        return -1

    def alloc_many(self, n: int) -> list[int]:
        if n > len(self._free):
            return []
        taken = self._free[-n:] if n else []
        del self._free[len(self._free) - n:]
        return taken

    def refill(self) -> int:
        moved = 0
        while self._reserve:
            row = self._reserve.pop()  # clean: near miss, every row of the reserve goes to the free list
            self._free.append(row)
            moved += 1
        return moved

    def free(self, row: int) -> None:
        self._free.append(row)


class HostBuffers:
    def __init__(self, count: int, rows: int, dim: int) -> None:
        self._idle = [torch.empty(rows, dim) for _ in range(count)]

    def lend(self) -> Optional[torch.Tensor]:
        if not self._idle:
            return None
        return self._idle.pop()

    def back(self, buf: torch.Tensor) -> None:
        self._idle.append(buf)


@dataclass(eq=False)
class Prefetched:
    ids: list[int]
    rows: list[int]
    buf: torch.Tensor


class EmbeddingCache:
    def __init__(self, table: torch.Tensor, cache: torch.Tensor, slots: RowSlots, host: HostBuffers) -> None:
        self.table = table
        self.cache = cache
        self.slots = slots
        self.host = host
        self.row_of: OrderedDict[int, int] = OrderedDict()
        self.ahead: list[Prefetched] = []

    def _evict_one(self) -> bool:
        if not self.row_of:
            return False
        idx, row = self.row_of.popitem(last=False)
        self.table[idx].copy_(self.cache[row])
        self.slots.free(row)
        return True

    def _row(self) -> int:
        row = self.slots.alloc()  # clean: handed to the caller
        if row < 0 and self._evict_one():
            row = self.slots.alloc()  # clean: near miss, the first attempt was -1, so nothing is overwritten
        return row

    def lookup(self, ids: list[int]) -> torch.Tensor:
        for idx in ids:
            if idx in self.row_of:
                self.row_of.move_to_end(idx)
                continue
            row = self._row()  # leak: an id outside the table is skipped after its row was taken
            if row < 0:
                break
            if idx >= self.table.shape[0]:
                continue
            self.cache[row].copy_(self.table[idx])
            self.row_of[idx] = row
        return self.cache[[self.row_of[i] for i in ids if i in self.row_of]]

    def insert(self, idx: int, value: torch.Tensor) -> bool:
        row = self.row_of.get(idx, -1)
        if row < 0:
            row = self._row()  # clean: near miss, -1 returns and a real row is stored in row_of
            if row < 0:
                return False
            self.row_of[idx] = row
        self.cache[row].copy_(value)
        return True

    def replace(self, idx: int, value: torch.Tensor) -> bool:
        row = self._row()  # leak: when idx is cached already its old row is overwritten in row_of
        if row < 0:
            return False
        self.cache[row].copy_(value)
        self.row_of[idx] = row
        return True

    def prefetch(self, ids: list[int]) -> bool:
        missing = [i for i in dict.fromkeys(ids) if i not in self.row_of]
        if not missing:
            return True
        buf = self.host.lend()  # leak: without enough rows prefetch() returns False and keeps the host buffer
        if buf is None:
            return False
        rows = self.slots.alloc_many(len(missing))  # clean: kept in ahead until commit() or discard()
        if not rows:
            return False
        torch.index_select(self.table, 0, torch.tensor(missing), out=buf[: len(missing)])
        self.ahead.append(Prefetched(missing, rows, buf))
        return True

    def prefetch_one(self, idx: int) -> bool:
        if idx in self.row_of:
            return True
        row = self.slots.alloc()  # clean: near miss, freed when there is no buffer
        if row < 0:
            return False
        buf = self.host.lend()  # clean: kept in ahead, and commit() and discard() hand it back
        if buf is None:
            self.slots.free(row)
            return False
        buf[0].copy_(self.table[idx])
        self.ahead.append(Prefetched([idx], [row], buf))
        return True

    def commit(self) -> None:
        while self.ahead:
            item = self.ahead.pop(0)
            for pos, (idx, row) in enumerate(zip(item.ids, item.rows)):
                if idx in self.row_of:
                    self.slots.free(row)
                    continue
                self.cache[row].copy_(item.buf[pos])
                self.row_of[idx] = row
            self.host.back(item.buf)

    def discard(self) -> None:
        for item in self.ahead:
            for row in item.rows:
                self.slots.free(row)
            self.host.back(item.buf)
        self.ahead.clear()

    def batches(self, source: Iterable[list[int]]) -> Iterator[torch.Tensor]:
        for ids in source:
            buf = self.host.lend()  # leak: an empty batch ends the generator with the buffer in hand
            if buf is None:
                return
            if not ids:
                return
            out = buf[: len(ids)]
            torch.index_select(self.table, 0, torch.tensor(ids), out=out)
            yield out.clone()
            self.host.back(buf)

    def export(self, source: Iterable[list[int]]) -> Iterator[torch.Tensor]:
        buf = self.host.lend()  # clean: near miss, one buffer for all batches, handed back in finally
        if buf is None:
            return
        try:
            for ids in source:
                if not ids:
                    return
                torch.index_select(self.table, 0, torch.tensor(ids), out=buf[: len(ids)])
                yield buf[: len(ids)].clone()
        finally:
            self.host.back(buf)

    def flush(self) -> int:
        self.discard()
        count = 0
        while self._evict_one():
            count += 1
        return count + self.slots.refill()
