"""Seats: one per thing a job can sit on, sorted in rows by tag ("cpu", "gpu", "coordinator")."""
import contextlib
import threading
from dataclasses import dataclass
from typing import Iterable, Iterator, Optional


class NoSeat(Exception):
    """Its argument is the tag of the row."""


@dataclass(frozen=True)
class Seat:
    tag: str
    number: int


class SeatBook:
    def __init__(self, plan: dict[str, int]):
        self._rows = {tag: [Seat(tag, n) for n in range(count)] for tag, count in plan.items()}
        self._cond = threading.Condition()

    def occupy(self, tag: str, wait: Optional[float] = None) -> Seat:
        with self._cond:
            row = self._rows[tag]
            if not self._cond.wait_for(lambda: row, wait):
                raise NoSeat(tag)
            return row.pop()  # clean: returned to the caller

    def occupy_or_none(self, tag: str) -> Optional[Seat]:
        try:
            return self.occupy(tag, wait=0)  # clean: returned to the caller
        except NoSeat:
            return None

    def occupy_any(self, tags: Iterable[str]) -> Optional[Seat]:
        for tag in tags:
            seat = self.occupy_or_none(tag)  # clean: near miss, the loop only goes on when there was none
            if seat is not None:
                return seat
        return None

    def occupy_block(self, tag: str, count: int) -> list[Seat]:
        """All or nothing; an empty list when the row is too short."""
        block: list[Seat] = []
        with self._cond:
            row = self._rows[tag]
            while row and len(block) < count:
                block.append(row.pop())  # clean: near miss, an incomplete block goes back to the row
            if len(block) < count:
                row.extend(block)
                block.clear()
        return block

    def vacate(self, seat: Seat) -> None:
        with self._cond:
            self._rows[seat.tag].append(seat)
            self._cond.notify_all()

    @contextlib.contextmanager
    def seated(self, tag: str, wait: Optional[float] = None) -> Iterator[Seat]:
        seat = self.occupy(tag, wait)  # clean: vacated by the finally
        try:
            yield seat
        finally:
            self.vacate(seat)
