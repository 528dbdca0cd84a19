"""Evaluation farm: worker seats, job tickets and the threads that use them."""
from __future__ import annotations

import concurrent.futures as cf
import logging
import queue
import threading
from typing import Any, Callable, NamedTuple, Optional

log = logging.getLogger("eval.farm")


class Seat(NamedTuple):
    host: str
    number: int


class SeatMap:
    """Seats of all hosts; claim() answers a seat or None, vacate() frees it."""

    def __init__(self, hosts: dict) -> None:
        self._open = {h: list(range(n)) for h, n in hosts.items()}
        self._guard = threading.RLock()
        self._freed = threading.Condition(self._guard)

    def claim(self, host: Optional[str] = None) -> Optional[Seat]:
        with self._guard:
            for name, numbers in self._open.items():
                if numbers and (host is None or name == host):
                    return Seat(name, numbers.pop())
            return None

    def claim_wait(self) -> Seat:
        with self._freed:
            while True:
                seat = self.claim()  # clean: handed to the caller, None waits again
                if seat is not None:
                    return seat
                self._freed.wait(1.0)

    def vacate(self, seat: Seat) -> None:
        with self._freed:
            self._open[seat.host].append(seat.number)
            self._freed.notify()


class EvalJob:
    def __init__(self, suite: str, episodes: int, play: Callable[[Seat, int], float]) -> None:
        self.suite = suite
        self.episodes = episodes
        self.play = play
        self.seat: Optional[Seat] = None
        self.results: list = []

    def run(self) -> float:
        for n in range(self.episodes):
            self.results.append(self.play(self.seat, n))
        return sum(self.results) / max(1, len(self.results))


class Farm:
    def __init__(self, seats: SeatMap, workers: int) -> None:
        self.seats = seats
        self.pool = cf.ThreadPoolExecutor(workers)
        self.scores: dict = {}

    def submit(self, job: EvalJob) -> cf.Future:
        job.seat = self.seats.claim_wait()  # clean: near miss, _finish() vacates it as the future's callback
        future = self.pool.submit(job.run)
        future.add_done_callback(lambda f: self._finish(job, f))
        return future

    def _finish(self, job: EvalJob, future: cf.Future) -> None:
        seat, job.seat = job.seat, None
        self.seats.vacate(seat)
        if future.exception() is None:
            self.scores[job.suite] = future.result()

    def submit_on(self, job: EvalJob, host: str) -> Optional[cf.Future]:
        job.seat = self.seats.claim(host)  # leak: _record() keeps the score and never vacates
        if job.seat is None:
            return None
        future = self.pool.submit(job.run)
        future.add_done_callback(lambda f: self._record(job, f))
        return future

    def _record(self, job: EvalJob, future: cf.Future) -> None:
        job.seat = None
        if future.exception() is not None:
            log.warning("suite %s failed", job.suite)
            return
        self.scores[job.suite] = future.result()


def spread(seats: SeatMap, hosts: list) -> dict:
    """A seat on each host, all or none; the caller vacates."""
    got: dict = {}
    for host in hosts:
        seat = seats.claim(host)  # clean: near miss, given back on failure and handed over on success
        if seat is None:
            for other in got.values():
                seats.vacate(other)
            return {}
        got[host] = seat
    return got


def latency_matrix(seats: SeatMap, hosts: list, ping: Callable[[Seat, Seat], float]) -> dict:
    got = spread(seats, hosts)  # clean: all are vacated at the end
    matrix = {}
    for a, sa in got.items():
        for b, sb in got.items():
            if a != b:
                matrix[a, b] = ping(sa, sb)
    for seat in got.values():
        seats.vacate(seat)
    return matrix


def reachable_hosts(seats: SeatMap, hosts: list, ping: Callable[[Seat], bool]) -> list:
    got = spread(seats, hosts)  # leak: only the seats of the reachable hosts are vacated
    up = []
    for host, seat in got.items():
        if not ping(seat):
            log.warning("%s does not answer", host)
            continue
        up.append(host)
        seats.vacate(seat)
    return up


def spread_partial(seats: SeatMap, hosts: list, need: int) -> Optional[list]:
    got = []
    for host in hosts:
        seat = seats.claim(host)  # leak: too few answers None and forgets the seats already in the list
        if seat is not None:
            got.append(seat)
    if len(got) < need:
        return None
    return got


class SeatWorker(threading.Thread):
    """Takes jobs from a queue; None ends it."""

    def __init__(self, seats: SeatMap, jobs: queue.Queue) -> None:
        super().__init__(daemon=True)
        self.seats, self.jobs = seats, jobs
        self.done: list = []

    def run(self) -> None:
        while True:
            job = self.jobs.get()
            if job is None:
                return
            seat = self.seats.claim_wait()  # clean: near miss, the return above comes before the claim
            job.seat = seat
            self.done.append((job.suite, job.run()))
            job.seat = None
            self.seats.vacate(seat)


class StickyWorker(threading.Thread):
    """Keeps one seat for all of its jobs."""

    def __init__(self, seats: SeatMap, jobs: queue.Queue, limit: int) -> None:
        super().__init__(daemon=True)
        self.seats, self.jobs, self.limit = seats, jobs, limit
        self.done: list = []

    def run(self) -> None:
        seat = self.seats.claim_wait()  # leak: None in the queue ends the thread before the vacate
        while len(self.done) < self.limit:
            job = self.jobs.get()
            if job is None:
                return
            job.seat = seat
            self.done.append((job.suite, job.run()))
        self.seats.vacate(seat)


def dispatch(seats: SeatMap, kind: str, play: Callable[[Any, int], float]) -> float:
    seat = seats.claim_wait()  # leak: the "probe" arm answers without a vacate
    match kind:
        case "single":
            score = play(seat, 0)
        case "best_of_three":
            score = max(play(seat, n) for n in range(3))
        case "probe":
            return 0.0 if seat.number % 2 else 1.0
        case _:
            score = 0.0
    seats.vacate(seat)
    return score


def dispatch_table(seats: SeatMap, kind: str, play: Callable[[Any, int], float]) -> float:
    seat = seats.claim_wait()  # clean: near miss, all arms meet at the vacate
    match kind:
        case "single":
            score = play(seat, 0)
        case "mean":
            score = sum(play(seat, n) for n in range(5)) / 5
        case _:
            log.warning("unknown kind %s", kind)
            score = 0.0
    seats.vacate(seat)
    return score
