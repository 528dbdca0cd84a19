"""Seats in the capacity buffers of local experts."""
from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence

import torch


@dataclass(frozen=True)
class Seat:
    expert: int
    row: int
    count: int


class CapacityPool:
    """Each expert owns a range of rows; a seat is a run of rows."""

    def __init__(self, experts: int, rows: int, hidden: int):
        self.rows = rows
        self.storage = torch.empty(experts, rows, hidden)
        self._free: List[List[int]] = [list(range(rows)) for _ in range(experts)]
        self._lock = threading.Lock()

    def rent(self, expert: int, count: int) -> Optional[Seat]:
        with self._lock:
            free = self._free[expert]
            if len(free) < count:
                return None
            start = free[0]
            if free[count - 1] != start + count - 1:
                return None
            del free[:count]
            return Seat(expert, start, count)

    def unrent(self, seat: Seat) -> None:
        with self._lock:
            free = self._free[seat.expert]
            free.extend(range(seat.row, seat.row + seat.count))
            free.sort()

    def rows_of(self, seat: Seat) -> torch.Tensor:
        return self.storage[seat.expert, seat.row:seat.row + seat.count]


class OverflowPool:
    """Falls back to a neighbour when the expert that was asked for is full."""

    def __init__(self, primary: CapacityPool, neighbours: Dict[int, Sequence[int]]):
        self.primary = primary
        self.neighbours = neighbours
        self.spilled: Dict[int, int] = defaultdict(int)

    def rent(self, expert: int, count: int) -> Optional[Seat]:
        seat = self.primary.rent(expert, count)  # clean: handed to the caller
        if seat is not None:
            return seat
        for other in self.neighbours.get(expert, ()):
            seat = self.primary.rent(other, count)  # clean: handed to the caller
            if seat is not None:
                self.spilled[expert] += count
                return seat
        return None

    def unrent(self, seat: Seat) -> None:
        self.primary.unrent(seat)

    def rent_balanced(self, experts: Sequence[int], count: int) -> Optional[Seat]:
        """The lowest row wins; the other candidates go back."""
        best: Optional[Seat] = None
        for expert in experts:
            seat = self.primary.rent(expert, count)  # clean: near miss, the loser of each pair goes back
            if seat is None:
                continue
            if best is None:
                best = seat
            elif seat.row < best.row:
                self.primary.unrent(best)
                best = seat
            else:
                self.primary.unrent(seat)
        return best

    def rent_widest(self, expert: int, counts: Sequence[int]) -> Optional[Seat]:
        """Try every size and keep the widest seat."""
        widest: Optional[Seat] = None
        for count in counts:
            seat = self.primary.rent(expert, count)  # leak: the narrower seat of each pair is overwritten
            if seat is None:
                continue
            if widest is None or seat.count > widest.count:
                widest = seat
            else:
                self.primary.unrent(seat)
        return widest
