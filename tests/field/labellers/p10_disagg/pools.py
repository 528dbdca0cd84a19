"""Token slots and request rows shared by the prefill and decode sides."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Optional


class TokenSlotAllocator:
    def __init__(self, size: int) -> None:
        self.size = size
        self.free_slots: List[int] = list(range(1, size + 1))
        self.grouped: Optional[List[int]] = None

    def alloc(self, n: int) -> Optional[List[int]]:
        if n > len(self.free_slots):
            return None
        picked = self.free_slots[:n]  # clean: pool body, returned to the caller
        self.free_slots = self.free_slots[n:]
        return picked

    def dealloc(self, slots: List[int]) -> None:
        if not slots:
            return
        if self.grouped is not None:
            self.grouped.extend(slots)
        else:
            self.free_slots.extend(slots)

    def group_begin(self) -> None:
        self.grouped = []

    def group_end(self) -> None:
        pending, self.grouped = self.grouped, None
        self.dealloc(pending or [])


class RowPool:
    def __init__(self, rows: int) -> None:
        self.free_rows: List[int] = list(range(rows))

    def alloc(self) -> Optional[int]:
        return self.free_rows.pop() if self.free_rows else None  # clean: pool body, returned to the caller

    def dealloc(self, row: int) -> None:
        self.free_rows.append(row)


@dataclass
class DisaggReq:
    rid: str
    length: int
    row: int = -1
    meta_row: int = -1
    slots: List[int] = field(default_factory=list)
    status: str = "bootstrapping"
