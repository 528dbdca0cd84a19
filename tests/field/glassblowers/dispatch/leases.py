from __future__ import annotations

from typing import Dict, Optional

from .conns import Worker


class SlotBook:
    """Decode slots per worker as the router believes them to be."""

    def __init__(self, capacity: Dict[str, int]) -> None:
        self.capacity = capacity
        self.booked: Dict[str, int] = {name: 0 for name in capacity}

    def book(self, worker: Worker, n: int = 1) -> Optional["Booking"]:
        if self.booked[worker.name] + n > self.capacity[worker.name]:
            return None
        self.booked[worker.name] += n
        return Booking(self, worker, n)


class Booking:
    def __init__(self, book: SlotBook, worker: Worker, n: int) -> None:
        self.book = book
        self.worker = worker
        self.n = n
        self.active = True

    def cancel(self) -> None:
        if self.active:
            self.active = False
            self.book.booked[self.worker.name] -= self.n
