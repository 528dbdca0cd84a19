"""Routes requests: retries, hedging and sticky sessions over the replica table."""
from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Callable

from .replicas import Booking, LoadTicket, ReplicaTable

Send = Callable[[str, bytes], bytes | None]


@dataclass
class Session:
    sid: str
    model: str
    ticket: LoadTicket | None
    last_seen: float


class Router:
    def __init__(self, table: ReplicaTable, send: Send):
        self.table = table
        self.send = send
        self.sessions: dict[str, Session] = {}
        self.parked: deque[LoadTicket] = deque(maxlen=64)
        self.detached: list[LoadTicket] = []
        self.retries = 0

    def forward(self, model: str, body: bytes) -> bytes | None:
        with Booking(self.table, model, 1) as booking:  # clean: __exit__ unbooks on each return
            if booking.ticket is None:
                return None
            return self.send(booking.ticket.replica.url, body)

    def forward_retry(self, model: str, body: bytes, attempts: int) -> bytes | None:
        for _ in range(attempts):
            ticket = self.table.book(model, 1)  # leak: a failed attempt goes round with its ticket booked
            if ticket is None:
                return None
            answer = self.send(ticket.replica.url, body)
            if answer is not None:
                self.table.unbook(ticket)
                return answer
            self.retries += 1
        return None

    def forward_retry_fallback(self, models: list[str], body: bytes, attempts: int) -> bytes | None:
        answer = None
        for _ in range(attempts):
            ticket = self.table.book_any(models, 1)  # clean: unbooked before success is looked at
            if ticket is None:
                break
            answer = self.send(ticket.replica.url, body)
            self.table.unbook(ticket)
            if answer is not None:
                break
        return answer

    def hedge(self, model: str, body: bytes) -> bytes | None:
        first = self.table.book(model, 1)  # clean: unbooked on both ways
        if first is None:
            return None
        answer = self.send(first.replica.url, body)
        if answer is None:
            second = self.table.book_distinct(model, 1, first.replica.url)  # leak: never unbooked afterwards
            if second is not None:
                answer = self.send(second.replica.url, body)
        self.table.unbook(first)
        return answer

    def open_session(self, sid: str, model: str) -> bool:
        if sid in self.sessions:
            return False
        with Booking(self.table, model, 4) as booking:  # clean: near miss, keep moves it to the session
            if booking.ticket is None:
                return False
            self.sessions[sid] = Session(sid, model, booking.keep(), time.monotonic())
        return True

    def move_session(self, sid: str) -> bool:
        session = self.sessions[sid]
        fresh = self.table.book(session.model, 4)  # clean: near miss, the session swaps its old ticket for it
        if fresh is None:
            return False
        if session.ticket is not None:
            self.table.unbook(session.ticket)
        session.ticket = fresh
        session.last_seen = time.monotonic()
        return True

    def close_session(self, sid: str) -> None:
        session = self.sessions.pop(sid)
        if session.ticket is not None:
            self.table.unbook(session.ticket)

    def expire(self, max_idle: float) -> int:
        now = time.monotonic()
        idle = [s.sid for s in self.sessions.values() if now - s.last_seen > max_idle]
        for sid in idle:
            self.close_session(sid)
        return len(idle)

    def park(self, model: str) -> bool:
        ticket = self.table.book(model, 1)  # leak: a full deque with maxlen silently drops its oldest ticket
        if ticket is None:
            return False
        self.parked.append(ticket)
        return True

    def unpark(self) -> LoadTicket | None:
        return self.parked.popleft() if self.parked else None

    def unpark_all(self) -> None:
        while self.parked:
            self.table.unbook(self.parked.popleft())

    def detach(self, model: str, cost: int) -> bool:
        ticket = self.table.book(model, cost)  # clean: near miss, sweep unbooks what is detached
        if ticket is None:
            return False
        self.detached.append(ticket)
        return True

    def sweep(self) -> int:
        pending, self.detached = self.detached, []
        for ticket in pending:
            self.table.unbook(ticket)
        return len(pending)
