"""Who takes part in a job: seats by round, and references on the rounds themselves."""
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class Seat:
    round_no: int
    rank: int
    node: str


class Round:
    """A rendezvous round lives while it has references."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self._refs = 0
        self._seats: list[Optional[str]] = [None] * size
        self._lock = threading.Lock()

    def incref(self) -> "Round":
        with self._lock:
            self._refs += 1
        return self

    def decref(self) -> bool:
        with self._lock:
            self._refs -= 1
            return self._refs == 0

    def join(self, node: str) -> Optional[Seat]:
        with self._lock:
            for rank, who in enumerate(self._seats):
                if who is None:
                    self._seats[rank] = node
                    return Seat(self.number, rank, node)
        return None

    def part(self, seat: Seat) -> None:
        with self._lock:
            self._seats[seat.rank] = None

    def full(self) -> bool:
        return all(self._seats)


class Registry:
    def __init__(self) -> None:
        self._rounds: dict[int, Round] = {}
        self._guard = threading.RLock()
        self._latest = -1

    def open_round(self, size: int) -> Round:
        """A new round with one reference, the caller's."""
        with self._guard:
            self._latest += 1
            rnd = self._rounds[self._latest] = Round(self._latest, size)
        return rnd.incref()  # clean: handed on to the caller

    def lookup(self, number: Optional[int] = None) -> Optional[Round]:
        """An existing round with a reference more; close_round ends it."""
        with self._guard:
            rnd = self._rounds.get(self._latest if number is None else number)
            return None if rnd is None else rnd.incref()  # clean: handed on to the caller

    def close_round(self, rnd: Round) -> None:
        with self._guard:
            if rnd.decref():
                self._rounds.pop(rnd.number, None)

    def freeze(self) -> int:
        """Keeps the registry as it is until thaw."""
        self._guard.acquire()  # clean: near miss, thaw releases it
        return self._latest

    def thaw(self) -> None:
        self._guard.release()

    def compact(self, keep: int) -> int:
        self._guard.acquire()  # leak: the early return keeps the guard
        if len(self._rounds) <= keep:
            return 0
        doomed = sorted(self._rounds)[:-keep]
        for number in doomed:
            del self._rounds[number]
        self._guard.release()
        return len(doomed)
