"""Cached rows of a host-resident embedding table."""
from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Iterable, Optional

import torch


class SlotPool:
    """Device row slots."""

    def __init__(self, n: int) -> None:
        self._free = list(range(n))

    def grab(self) -> Optional[int]:
        return self._free.pop() if self._free else None

    def put(self, slot: int) -> None:
        self._free.append(slot)

    def __len__(self) -> int:
        return len(self._free)


@dataclass(frozen=True)
class PinnedRows:
    ids: tuple[int, ...]
    slots: tuple[int, ...]


class RowCache:
    """LRU over row ids.  Rows with a pin count above zero stay where they are."""

    def __init__(self, table: torch.Tensor, n_slots: int, device: str = "cuda") -> None:
        self._table = table
        self._pool = SlotPool(n_slots)
        self._where: "OrderedDict[int, int]" = OrderedDict()
        self._pins: Counter[int] = Counter()
        self._mutex = threading.RLock()
        self.data = torch.empty(n_slots, table.shape[1], device=device)
        self.hits = 0
        self.misses = 0

    def _evict(self) -> bool:
        for row, slot in self._where.items():
            if self._pins[row] == 0:
                del self._where[row]
                self._pool.put(slot)
                return True
        return False

    def _load(self, row: int) -> Optional[int]:
        if row in self._where:
            self.hits += 1
            self._where.move_to_end(row)
            return self._where[row]
        self.misses += 1
        if len(self._pool) == 0 and not self._evict():
            return None
        slot = self._pool.grab()  # clean: near miss, recorded in _where, put back by _evict
        self.data[slot].copy_(self._table[row])
        self._where[row] = slot
        return slot

    def pin(self, ids: Iterable[int]) -> Optional[PinnedRows]:
        """Pin all rows or none."""
        wanted = tuple(ids)
        slots: list[int] = []
        with self._mutex:
            for row in wanted:
                slot = self._load(row)
                if slot is None:
                    for done in wanted[: len(slots)]:
                        self._pins[done] -= 1
                    return None
                self._pins[row] += 1
                slots.append(slot)
        return PinnedRows(wanted, tuple(slots))

    def unpin(self, rows: PinnedRows) -> None:
        with self._mutex:
            for row in rows.ids:
                self._pins[row] -= 1


class HotSet:
    """Rows promoted by hand to a reserved region, outside the LRU."""

    def __init__(self, table: torch.Tensor, n: int) -> None:
        self._table = table
        self._pool = SlotPool(n)
        self._hot: dict[int, int] = {}
        self.data = torch.empty(n, table.shape[1])

    def promote(self, row: int) -> bool:
        if row in self._hot:
            return True
        slot = self._pool.grab()  # leak: demote and demote_all forget the slot
        if slot is None:
            return False
        self.data[slot].copy_(self._table[row])
        self._hot[row] = slot
        return True

    def demote(self, row: int) -> None:
        slot = self._hot.pop(row, None)
        if slot is not None:
            self._table[row].copy_(self.data[slot])

    def demote_all(self) -> None:
        for row, slot in self._hot.items():
            self._table[row].copy_(self.data[slot])
        self._hot = {}
