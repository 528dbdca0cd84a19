"""Runners carry out one job each, on a thread, in the seats they were given."""
from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Callable

from .seats import Seat, SeatBook

logger = logging.getLogger("jobqueue.runners")


class StepSkipped(Exception):
    pass


@dataclass
class Step:
    tag: str
    body: Callable[[Seat], None]


@dataclass(order=True)
class Job:
    priority: int
    id: str = field(compare=False)
    tag: str = field(compare=False)
    steps: list[Step] = field(compare=False)
    gang: int = field(compare=False, default=1)
    cancelled: threading.Event = field(compare=False, default_factory=threading.Event)


class Runner:
    """Takes over the seat when start() is called and vacates it at the end of the thread."""

    def __init__(self, job: Job, seat: Seat, book: SeatBook, on_exit: Callable[[Job], None]):
        self.job, self.seat, self.book = job, seat, book
        self.on_exit = on_exit
        self._thread = threading.Thread(target=self._main, name=f"job-{job.id}")

    def start(self) -> bool:
        if self.job.cancelled.is_set():
            logger.info("job %s was cancelled before its start", self.job.id)
            return False
        self._thread.start()
        return True

    def _main(self) -> None:
        seat = self.seat
        try:
            for step in self.job.steps:
                if step.tag != seat.tag:
                    other = self.book.occupy(step.tag)  # clean: near miss, becomes the seat that the finally vacates
                    self.book.vacate(seat)
                    seat = other
                try:
                    step.body(seat)
                except StepSkipped:
                    continue
        finally:
            self.book.vacate(seat)
            self.on_exit(self.job)


class GangRunner(Runner):
    """Runs the same steps in many seats at once, the coordinator seat is vacated last."""

    def __init__(self, job: Job, seats: list[Seat], leader: Seat, book: SeatBook, on_exit: Callable[[Job], None]):
        super().__init__(job, leader, book, on_exit)
        self.seats = seats

    def start(self) -> bool:
        started = super().start()
        if not started:
            self._leave()
        return started

    def _leave(self) -> None:
        for seat in self.seats:
            self.book.vacate(seat)
        self.book.vacate(self.seat)

    def _main(self) -> None:
        try:
            for step in self.job.steps:
                members = [threading.Thread(target=step.body, args=(seat,)) for seat in self.seats]
                for member in members:
                    member.start()
                for member in members:
                    member.join()
        finally:
            self._leave()
            self.on_exit(self.job)


def run_hedged(book: SeatBook, job: Job, patience: float) -> float:
    """Run a short job here and, when it is slow, once more in a second seat."""
    done = threading.Event()

    def attempt(seat: Seat) -> None:
        try:
            for step in job.steps:
                step.body(seat)
            done.set()
        finally:
            book.vacate(seat)

    begun = time.monotonic()
    first = book.occupy(job.tag, wait=10.0)  # clean: near miss, the attempt vacates it
    threading.Thread(target=attempt, args=(first,)).start()
    if not done.wait(patience):
        backup = book.occupy_or_none(job.tag)  # leak: when the first attempt ends meanwhile, the backup seat is not used and not vacated
        if backup is not None and not done.is_set():
            threading.Thread(target=attempt, args=(backup,)).start()
        done.wait()
    return time.monotonic() - begun
