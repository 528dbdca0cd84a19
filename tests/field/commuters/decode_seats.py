"""Continuous batching: each running request occupies one seat of the decode batch."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Callable, Deque, Iterable, Optional


@dataclass
class Seat:
    row: int
    position: int = 0


@dataclass
class Request:
    rid: str
    prompt: list[int]
    priority: int = 0
    output: list[int] = field(default_factory=list)
    seat: Optional[Seat] = None
    aborted: bool = False


class SeatMap:
    def __init__(self, rows: int) -> None:
        self._open: set[int] = set(range(rows))
        self.rows = rows

    def sit(self) -> Optional[Seat]:
        if not self._open:
            return None
        row = min(self._open)
        self._open.remove(row)  # clean: the row goes out inside the seat
        return Seat(row)

    def sit_pair(self) -> Optional[tuple[Seat, Seat]]:
        if len(self._open) < 2:
            return None
        first = self._open.pop()  # clean: half of the returned pair
        second = self._open.pop()  # clean: the length was checked, other half of the pair
        return Seat(first), Seat(second)

    def stand(self, seat: Seat) -> None:
        self._open.add(seat.row)


class Scheduler:
    def __init__(self, seats: SeatMap) -> None:
        self.seats = seats
        self.waiting: Deque[Request] = deque()
        self.running: list[Request] = []
        self.preempted: Deque[Request] = deque()

    def submit(self, req: Request) -> None:
        self.waiting.append(req)

    def fill(self) -> int:
        started = 0
        while self.waiting:
            seat = self.seats.sit()  # leak: an aborted request is skipped together with the seat
            if seat is None:
                break
            req = self.waiting.popleft()
            if req.aborted:
                continue
            req.seat = seat
            self.running.append(req)
            started += 1
        return started

    def fill_by_priority(self) -> int:
        ordered = sorted(self.waiting, key=lambda r: -r.priority)
        started = 0
        for req in ordered:
            if req.aborted:
                continue
            seat = self.seats.sit()  # clean: near miss, the skip comes before sitting
            if seat is None:
                break
            self.waiting.remove(req)
            req.seat = seat
            self.running.append(req)
            started += 1
        return started

    def step(self, decode: Callable[[list[int]], list[int]], eos: int) -> None:
        tokens = decode([r.seat.row for r in self.running if r.seat is not None])
        still: list[Request] = []
        for req, token in zip(self.running, tokens):
            req.output.append(token)
            if token == eos or req.aborted:
                self._leave(req)
            else:
                still.append(req)
        self.running = still

    def _leave(self, req: Request) -> None:
        if req.seat is not None:
            self.seats.stand(req.seat)
            req.seat = None

    def preempt(self, count: int) -> None:
        for _ in range(min(count, len(self.running))):
            req = self.running.pop()
            self._leave(req)
            self.preempted.append(req)

    def resume(self) -> bool:
        if not self.preempted:
            return False
        req = self.preempted.popleft()
        req.seat = self.seats.sit()  # clean: the seat is the request's, or None and it queues again
        if req.seat is None:
            self.preempted.appendleft(req)
            return False
        self.running.append(req)
        return True

    def reseat(self, req: Request) -> bool:
        """Move a request to a lower row to keep the batch dense."""
        better = self.seats.sit()  # leak: a row that is not better is simply abandoned
        if better is None or req.seat is None:
            return False
        if better.row < req.seat.row:
            self.seats.stand(req.seat)
            req.seat = better
            return True
        return False

    def start_guided(self, cond: Request, uncond: Request) -> bool:
        """Classifier-free guidance runs two rows in lockstep."""
        pair = self.seats.sit_pair()  # clean: one seat per request, both in running
        if pair is None:
            return False
        cond.seat, uncond.seat = pair
        self.running += [cond, uncond]
        return True

    def start_speculative(self, req: Request) -> bool:
        pair = self.seats.sit_pair()  # leak: the second seat of the pair is thrown away
        if pair is None:
            return False
        req.seat, _ = pair
        self.running.append(req)
        return True


def score_prompts(seats: SeatMap, prompts: Iterable[list[int]], score: Callable[[int, list[int]], float]) -> list[float]:
    seat = seats.sit()  # clean: near miss, one seat for all prompts and stood up after the loop
    if seat is None:
        return []
    scores = []
    for prompt in prompts:
        if not prompt:
            scores.append(0.0)
            continue
        scores.append(score(seat.row, prompt))
    seats.stand(seat)
    return scores


def warm_rows(seats: SeatMap, warm: Callable[[int], bool]) -> list[int]:
    taken: list[Seat] = []
    warmed: list[int] = []
    for _ in range(seats.rows):
        seat = seats.sit()  # leak: a row that fails to warm never joins the list that stands up
        if seat is None:
            break
        if not warm(seat.row):
            continue
        taken.append(seat)
        warmed.append(seat.row)
    for seat in taken:
        seats.stand(seat)
    return warmed
