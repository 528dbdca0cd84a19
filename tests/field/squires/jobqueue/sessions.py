"""Interactive sessions: a seat for a person, until the session is closed or swept."""
from __future__ import annotations

import itertools
import logging
import pathlib
import time

from .seats import NoSeat, Seat, SeatBook

logger = logging.getLogger("jobqueue.sessions")


class HomeMissing(Exception):
    pass


class Session:
    def __init__(self, number: int, user: str, seat: Seat, book: SeatBook):
        self.number, self.user, self.seat = number, user, seat
        self._book = book
        self._gpu: Seat | None = None
        self.touched = time.monotonic()

    def attach_gpu(self) -> bool:
        if self._gpu is None:
            self._gpu = self._book.occupy_or_none("gpu")  # leak: close() vacates the seat of the session only
        self.touched = time.monotonic()
        return self._gpu is not None

    def close(self) -> None:
        logger.info("session %d of %s ends", self.number, self.user)
        self._book.vacate(self.seat)


class SessionManager:
    def __init__(self, book: SeatBook, homes: str):
        self._book, self._homes = book, pathlib.Path(homes)
        self._sessions: dict[int, Session] = {}
        self._numbers = itertools.count(1)

    def _home_of(self, user: str) -> pathlib.Path:
        home = self._homes / user
        if not home.is_dir():
            raise HomeMissing(user)
        return home

    def open(self, user: str, tags: tuple[str, ...] = ("cpu", "gpu")) -> Session:
        seat = self._book.occupy_any(tags)  # leak: HomeMissing is raised by _home_of before a session owns the seat
        if seat is None:
            raise NoSeat("/".join(tags))
        (self._home_of(user) / ".session").touch()
        session = Session(next(self._numbers), user, seat, self._book)
        self._sessions[session.number] = session
        return session

    def clone(self, number: int) -> Session | None:
        origin = self._sessions.get(number)
        if origin is None:
            return None
        seat = self._book.occupy(origin.seat.tag, wait=5.0)  # clean: near miss, owned by the new session, which close() or sweep() ends
        twin = Session(next(self._numbers), origin.user, seat, self._book)
        self._sessions[twin.number] = twin
        return twin

    def close(self, number: int) -> None:
        session = self._sessions.pop(number, None)
        if session is not None:
            session.close()

    def sweep(self, max_idle: float) -> int:
        horizon = time.monotonic() - max_idle
        idle = [n for n, s in self._sessions.items() if s.touched < horizon]
        for number in idle:
            self.close(number)
        return len(idle)
