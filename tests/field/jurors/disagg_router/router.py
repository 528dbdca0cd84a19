"""Chooses a prefill/decode pair for each request and follows it to its end."""
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Callable, Optional

from .bootstrap import RoomTable
from .workers import Seat, Worker, WorkerSet

logger = logging.getLogger(__name__)
Post = Callable[[str, dict], bool]


@dataclass(eq=False)
class Flight:
    rid: str
    prefill: Optional[Seat]
    decode: Seat
    room: int


class Router:
    def __init__(self, workers: WorkerSet, rooms: RoomTable, post: Post) -> None:
        self.workers = workers
        self.rooms = rooms
        self.post = post
        self.flights: dict[str, Flight] = {}
        self.sticky: dict[str, Seat] = {}

    def route(self, rid: str, body: dict) -> bool:
        prefill = self.workers.book("prefill", rid)  # clean: near miss, vacated on both refusals, else in the flight, and prefill_done() or abort() vacates it
        if prefill is None:
            return False
        decode = self.workers.book("decode", rid)  # leak: when there is no room only the prefill seat is vacated
        if decode is None:
            self.workers.vacate(prefill)
            return False
        room = self.rooms.enter(prefill.worker.url, decode.worker.url)  # leak: finish() vacates the seats and never leaves the room
        if room is None:
            self.workers.vacate(prefill)
            return False
        self.flights[rid] = Flight(rid, prefill, decode, room)
        self.post(prefill.worker.url, {**body, "room": room})
        self.post(decode.worker.url, {**body, "room": room})
        return True

    def prefill_done(self, rid: str) -> None:
        flight = self.flights.get(rid)
        if flight is not None and flight.prefill is not None:
            self.workers.vacate(flight.prefill)
            flight.prefill = None

    def finish(self, rid: str) -> None:
        self.prefill_done(rid)
        flight = self.flights.pop(rid, None)
        if flight is None:
            return
        self.workers.vacate(flight.decode)

    def abort(self, rid: str) -> None:
        flight = self.flights.pop(rid, None)
        if flight is None:
            return
        if flight.prefill is not None:
            self.workers.vacate(flight.prefill)
        self.workers.vacate(flight.decode)
        self.rooms.leave(flight.room)

    def migrate(self, rid: str) -> bool:
        flight = self.flights.get(rid)
        if flight is None:
            return False
        seat = self.workers.book("decode", rid, avoid=flight.decode.worker)  # clean: near miss, a refused move vacates the new seat, an accepted one the old
        if seat is None:
            return False
        if not self.post(seat.worker.url, {"migrate": rid}):
            self.workers.vacate(seat)
            return False
        self.workers.vacate(flight.decode)
        flight.decode = seat
        return True

    def reassign_prefill(self, rid: str, broken: Worker) -> bool:
        flight = self.flights.get(rid)
        if flight is None:
            return False
        seat = self.workers.book("prefill", rid, avoid=broken)  # leak: overwrites the flight's prefill seat, which nobody vacates
        if seat is None:
            return False
        flight.prefill = seat
        return self.post(seat.worker.url, {"rid": rid, "room": flight.room})

    def tokenize(self, rid: str, body: dict) -> bool:
        seat = self.workers.book_any(["tokenizer", "prefill"], rid)  # clean: vacated in finally
        if seat is None:
            return False
        try:
            return self.post(seat.worker.url, body)
        finally:
            self.workers.vacate(seat)

    def stick(self, user: str) -> Seat | None:
        seat = self.sticky.get(user)
        if seat is None:
            seat = self.workers.book("decode", user)  # clean: near miss, stored once per user and vacated by unstick()
            if seat is None:
                return None
            self.sticky[user] = seat
        return seat

    def unstick(self, user: str) -> None:
        seat = self.sticky.pop(user, None)
        if seat is not None:
            self.workers.vacate(seat)

    def probe(self, roles: list[str]) -> dict[str, bool]:
        result: dict[str, bool] = {}
        for role in roles:
            seat = self.workers.book(role, "probe")  # leak: continue for a worker that does not answer skips vacate
            if seat is None:
                result[role] = False
                continue
            if not self.post(seat.worker.url, {"probe": True}):
                logger.warning("%s does not answer", seat.worker.url)
                seat.worker.healthy = False
                continue
            result[role] = True
            self.workers.vacate(seat)
        return result
