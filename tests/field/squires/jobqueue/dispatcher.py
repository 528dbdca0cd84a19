"""The dispatcher takes jobs off the queue and finds seats for them."""
from __future__ import annotations

import logging
import queue
import threading

from .runners import GangRunner, Job, Runner
from .seats import NoSeat, Seat, SeatBook

logger = logging.getLogger("jobqueue.dispatcher")


class Dispatcher(threading.Thread):
    def __init__(self, book: SeatBook, jobs: queue.PriorityQueue):
        super().__init__(name="dispatcher", daemon=True)
        self._book, self._jobs = book, jobs
        self._runners: dict[str, Runner] = {}
        self._express: Seat | None = None
        self._halt = threading.Event()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def run(self) -> None:
        while not self._halt.is_set():
            try:
                job = self._jobs.get(timeout=0.5)
            except queue.Empty:
                continue
            try:
                if job.gang > 1:
                    self._dispatch_gang(job)
                else:
                    self._dispatch(job)
            except NoSeat as exc:
                logger.debug("%s waits: %s", job.id, exc)
                self._jobs.put(job)

    def _dispatch(self, job: Job) -> None:
        if self._express is not None and self._express.tag == job.tag and job.priority == 0:
            seat, self._express = self._express, None
        else:
            seat = self._book.occupy(job.tag, wait=1.0)  # leak: start() is False for a cancelled job and nobody vacates the seat
        runner = Runner(job, seat, self._book, self._exited)
        self._runners[job.id] = runner
        if not runner.start():
            del self._runners[job.id]

    def _dispatch_gang(self, job: Job) -> None:
        seats = self._book.occupy_block(job.tag, job.gang)  # leak: NoSeat for the coordinator is raised to run(), which only requeues the job
        if not seats:
            raise NoSeat(job.tag)
        leader = self._book.occupy("coordinator", wait=0.1)  # clean: near miss, vacated by the gang runner, also when it does not start
        runner = GangRunner(job, seats, leader, self._book, self._exited)
        if runner.start():
            self._runners[job.id] = runner

    def _exited(self, job: Job) -> None:
        self._runners.pop(job.id, None)

    def keep_express(self, tag: str) -> bool:
        """Hold one seat back for the next urgent job."""
        self._express = self._book.occupy_or_none(tag)  # leak: a seat held back before is overwritten by the next call
        return self._express is not None

    def measure(self, tag: str, probe) -> float | None:
        try:
            with self._book.seated(tag, wait=0.0) as seat:  # clean: context manager
                return probe(seat)
        except NoSeat:
            return None

    def halt(self) -> None:
        self._halt.set()
        if self._express is not None:
            self._book.vacate(self._express)
            self._express = None
